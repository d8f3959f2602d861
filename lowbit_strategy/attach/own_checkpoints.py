"""Warns once if a plain loop writes checkpoints without `Session.save` or loads them without `Session.load`."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch.optim import Optimizer

from lowbit_strategy.attach.session import Session

_log = logging.getLogger("lowbit_strategy")


def notice_own_checkpoints(session: Session, optimizer: Optimizer) -> None:
    """Warn when `optimizer` steps again after its state was read or loaded, and the session did not save or load."""
    weak = weakref.ref(session)
    read_at: list[int] = []
    loaded: list[bool] = []

    def read(*_: Any) -> None:
        if (current := weak()) is not None:
            read_at[:] = [current.sync.step_index]

    def load(*_: Any) -> None:
        loaded[:] = [True]

    def step(*_: Any) -> None:
        current = weak()
        if current is None or current.is_closed or not (read_at or loaded):
            return
        if read_at and current.last_saved != read_at[0]:
            _warn(current, "read", "with session.save(path) as stamp: around the writing, which puts them next to it")
        if loaded and current.num_loads == 0:
            _warn(current, "loaded", "session.load(path, stamp) after it")
        read_at.clear()
        loaded.clear()

    optimizer.register_state_dict_post_hook(read)
    optimizer.register_load_state_dict_post_hook(load)
    optimizer.register_step_pre_hook(step)


def _warn(session: Session, what: str, instead: str) -> None:
    if session.noticed_own_checkpoint or not session.sync.ranks.logs:
        return
    session.noticed_own_checkpoint = True
    _log.warning(
        "the optimizer's state was %s without the session: if that was a checkpoint, it has no residuals, and training"
        " continues from it with residuals of zero. Call %s",
        what,
        instead,
    )
