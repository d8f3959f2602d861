"""torch's hook after every optimizer step: it tells sessions, and refuses a step on a model that was never attached."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy.attach.checks import NEVER_ATTACHED

# Sessions that are told of every step, in the order in which they were made: all ranks end their steps in this order.
watching: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
# Prepared models: a step before anything is attached is an error.
unattached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
_handles: list[Any] = []  # torch's hook, once per process


def install() -> None:
    """Have torch call after every step of an optimizer of ``torch.optim``, however it was called."""
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_on_step))


def _on_step(optimizer: Optimizer, *_: Any) -> None:
    for session in list(watching):
        session.on_optimizer_step(optimizer)
    if unattached:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(not stepped.isdisjoint(map(id, module.parameters())) for module in list(unattached)):
            raise RuntimeError(NEVER_ATTACHED)
