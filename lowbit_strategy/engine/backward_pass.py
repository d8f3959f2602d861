"""The backward pass that this thread runs, according to torch's autograd engine."""

from __future__ import annotations

from collections.abc import Callable

import torch

NO_PASS = -1


def current_pass() -> int:
    """The number of the backward pass; a nested one has a higher number. `NO_PASS`: none is running."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread computes gradients now."""
    return current_pass() != NO_PASS


def call_at_end(callback: Callable[[], None]) -> None:
    """Call `callback` when the current backward pass has computed all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def call_after_end(callback: Callable[[], None]) -> None:
    """Call `callback` after the current backward pass has ended and after all other end-of-pass callbacks, including
    those added while gradients are computed or by other callbacks: FSDP2 may reduce a module at the end of the pass.
    """
    call_at_end(lambda: call_at_end(lambda: call_at_end(callback)))
