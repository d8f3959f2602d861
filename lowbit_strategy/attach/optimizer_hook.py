"""Installs torch's hook after every optimizer step. It tells sessions, and refuses a step on a model that was never
attached.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

NEVER_ATTACHED = (
    "prepare was called for this model and nothing has been attached to it, so that its gradients are not compressed:"
    " call attach_ddp or attach_fsdp with the wrapped model before the first step, or compress(model, optimizer)"
)

# Sessions that are told of steps, in the order in which they were made: all ranks end their steps in this order. True:
# of every step. False: a later session has parameters of this one's model.
_watching: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
# Prepared models: a step before anything is attached is an error.
_unattached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
_handles: list[Any] = []  # torch's hook, once per process


def watch_optimizers(session: Any) -> None:
    """Call a session, as long as it lives, after every step of a ``torch.optim`` optimizer, however the step is called.
    An earlier session that shares parameters with it, perhaps because it had the same model, is called from now on only
    while its own reductions are open.
    """
    _take_over(session.param_ids)
    _watching[session] = True


def shares_parameters(session: Any) -> bool:
    """Whether a later session has parameters of this one's model."""
    return not _watching.get(session, True)


def stop_watching(session: Any) -> None:
    _watching.pop(session, None)


def await_attachment(module: nn.Module) -> None:
    """The model was prepared: make an optimizer step an error until a session watches for it."""
    _take_over(set(map(id, module.parameters())))
    _unattached[module] = None


def _take_over(param_ids: set[int]) -> None:
    """A model with these parameters has been prepared or attached, perhaps by another trainer."""
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_on_step))
    for session in list(_watching):
        if not session.param_ids.isdisjoint(param_ids):
            _watching[session] = False
    for module in list(_unattached):
        if not param_ids.isdisjoint(map(id, module.parameters())):  # as they are now: fully_shard replaces them
            _unattached.pop(module, None)


def has_rate(optimizer: Optimizer) -> bool:
    """Whether its step can move a parameter. A learning rate on a device counts as nonzero, since the host would wait
    for its value.
    """
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate for rate in rates)


def _on_step(optimizer: Optimizer, *_: Any) -> None:
    for session, is_latest in list(_watching.items()):
        if is_latest or session.sync.transactions.prepared:
            session.on_optimizer_step(optimizer)
    if _unattached and has_rate(optimizer):
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if any(not stepped.isdisjoint(map(id, module.parameters())) for module in list(_unattached)):
            raise RuntimeError(NEVER_ATTACHED)
