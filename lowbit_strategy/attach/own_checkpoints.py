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


class OwnCheckpoints:
    """Warns once when an optimizer steps after its state was read or loaded, and the session did not save or load.
    torch.distributed.checkpoint also reads state before it loads into it; that does not count.
    """

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._read_at: int | None = None  # the step in which an optimizer's state was read, since its last step
        self._has_loaded = self._has_told = False

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        for optimizer in optimizers:
            optimizer.register_state_dict_post_hook(self._on_read)
            optimizer.register_load_state_dict_post_hook(self._on_load)
            optimizer.register_step_pre_hook(self._on_step)

    def _on_read(self, *_: Any) -> None:
        if (session := self._session()) is not None:
            self._read_at = session.sync.step_index

    def _on_load(self, *_: Any) -> None:
        self._read_at, self._has_loaded = None, True

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        session = self._session()
        if session is None or session.is_closed or self._has_told or not has_rate(optimizer):
            return
        what: tuple[str, str] | None = None
        if self._read_at is not None and session.last_saved != self._read_at:
            what = "read", "with session.save(path) as stamp: around the writing, which puts residuals next to it"
        elif self._has_loaded and not session.has_loaded:
            what = "loaded", "session.load(path, stamp) after it"
        self._read_at, self._has_loaded = None, False
        if what and session.sync.ranks.logs:
            self._has_told = True
            _log.warning(_TEXT, *what)
