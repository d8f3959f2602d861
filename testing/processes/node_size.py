"""Several nodes on one machine: the launcher's own variable says how many ranks share one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def nodes_of(num_ranks: int | str) -> Iterator[None]:
    """As if `num_ranks` ranks shared this rank's node."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before
