"""Warns once if a plain loop writes checkpoints without `Session.save` or loads them without `Session.load`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from lowbit_strategy.attach.optimizer_hook import has_rate
from lowbit_strategy.attach.session import Session

_TEXT = (
    "the optimizer's state was %s without the session: if that was a checkpoint, it has no residuals, and training"
    " continues from it with residuals of zero. Call %s"
)
_log = logging.getLogger("lowbit_strategy")


def notice_own_checkpoints(session: Session, optimizers: Iterable[Optimizer]) -> None:
    """Warn once when an optimizer steps after its state was read or loaded, and the session did not save or load.
    torch.distributed.checkpoint also reads state before it loads into it; that does not count.
    """
    weak = weakref.ref(session)
    read_at: int | None = None
    has_loaded = has_told = False

    def read(*_: Any) -> None:
        nonlocal read_at
        if (current := weak()) is not None:
            read_at = current.sync.step_index

    def load(*_: Any) -> None:
        nonlocal read_at, has_loaded
        read_at, has_loaded = None, True

    def step(optimizer: Optimizer, *_: Any) -> None:
        nonlocal read_at, has_loaded, has_told
        current = weak()
        if current is None or current.is_closed or has_told or not has_rate(optimizer):
            return
        what: tuple[str, str] | None = None
        if read_at is not None and current.last_saved != read_at:
            what = "read", "with session.save(path) as stamp: around the writing, which puts residuals next to it"
        elif has_loaded and not current.has_loaded:
            what = "loaded", "session.load(path, stamp) after it"
        read_at, has_loaded = None, False
        if what and current.sync.ranks.logs:
            has_told = True
            _log.warning(_TEXT, *what)

    for optimizer in optimizers:
        optimizer.register_state_dict_post_hook(read)
        optimizer.register_load_state_dict_post_hook(load)
        optimizer.register_step_pre_hook(step)
