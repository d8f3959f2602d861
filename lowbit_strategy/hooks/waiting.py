"""Reports when training waits for other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowbit_strategy.engine.engine import GradientSync


@contextlib.contextmanager
def waiting(sync: GradientSync) -> Iterator[None]:
    """A context in which training waits. Not known on CUDA, where work overlaps computation."""
    done = sync.listeners.wait() if sync.device.type == "cpu" else None
    yield
    if done is not None:
        done()
