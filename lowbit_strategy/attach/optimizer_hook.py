"""Installs a hook that torch calls after every optimizer step. It tells sessions, and refuses a step on a model that
was never attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

NEVER_ATTACHED = (
    "prepare was called for this model, but nothing was attached to it, so its gradients are not compressed: call"
    " attach_ddp or attach_fsdp with the wrapped model before the first step, or compress(model, optimizer)"
)

# Sessions to call, in the order in which all ranks end their steps.
_watching: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
# Prepared models: a step before anything is attached is an error.
_unattached: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
_handles: list[Any] = []  # torch's hook, once per process


def watch_optimizers(session: Any) -> None:
    """Call this session after every step of a ``torch.optim`` optimizer, as long as the session lives. If several
    sessions share parameters, those with open reductions are called, or if there is none, the latest: this one now is.
    """
    stop_watching(session)
    _watching[session] = None


def is_superseded(session: Any) -> bool:
    """Whether a later session has parameters of this one's model."""
    sessions = list(_watching)
    return session in sessions and _shares(session, sessions[sessions.index(session) + 1 :])


def _shares(session: Any, others: Iterable[Any]) -> bool:
    return any(not session.param_ids.isdisjoint(each.param_ids) for each in others)


def stop_watching(session: Any) -> None:
    _watching.pop(session, None)


def await_attachment(module: nn.Module) -> None:
    """Make a step on this prepared model an error until attaching to it begins."""
    attachment_begins(module)
    _unattached[module] = None


def attachment_begins(module: nn.Module) -> None:
    """Allow steps on models with parameters of `module`, which another trainer may have prepared. If attaching fails,
    its own error says so.
    """
    if not _handles:
        _handles.append(register_optimizer_step_post_hook(_on_step))
    param_ids = set(map(id, module.parameters()))
    for prepared in list(_unattached):
        if not param_ids.isdisjoint(map(id, prepared.parameters())):  # the current ones: fully_shard replaces them
            _unattached.pop(prepared, None)


def has_rate(optimizer: Optimizer) -> bool:
    """Whether a step of `optimizer` can change a parameter. A learning rate on a device counts as nonzero, since the
    host would wait for its value.
    """
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    return any((isinstance(rate, Tensor) and rate.device.type != "cpu") or rate for rate in rates)


def _on_step(optimizer: Optimizer, *_: Any) -> None:
    reducing = [each for each in _watching if each.sync.transactions.open]
    for session in list(_watching):
        if session in reducing or not (_shares(session, reducing) or is_superseded(session)):
            session.on_optimizer_step(optimizer)
    if _unattached and has_rate(optimizer):
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        stepped.difference_update(*(each.param_ids for each in reducing))
        if any(not stepped.isdisjoint(map(id, module.parameters())) for module in list(_unattached)):
            raise RuntimeError(NEVER_ATTACHED)
