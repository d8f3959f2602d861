"""Which sessions learn that an optimizer has stepped: a loop that never ends its steps must not train on in silence."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_watchers: weakref.WeakSet[Any] = weakref.WeakSet()  # sessions
_handles: list[Any] = []  # torch's hook, once per process


def watch_optimizers(watcher: Any) -> None:
    """Tell a session, as long as it lives, after every step of an optimizer of ``torch.optim``.

    Who watched the same model before watches it no more: another trainer has taken it over.
    """
    for other in list(_watchers):
        if other is not watcher and other.shares_parameters(watcher):
            _watchers.discard(other)
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_on_step))
    _watchers.add(watcher)


def forget_optimizers(watcher: Any) -> None:
    """Tell it no more."""
    _watchers.discard(watcher)


def _on_step(optimizer: Optimizer, *_: Any) -> None:
    for watcher in list(_watchers):
        watcher.on_optimizer_step(optimizer)
