"""Local steps under a Trainer, for both Lightning namespaces."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lowbit_strategy.attach.session import Session
from lowbit_strategy.lightning.signals import REQUEUE, TERMINATE, DeferredSignals
from lowbit_strategy.lightning.strategies import averages_weights
from lowbit_strategy.local_steps.local_pace import LocalSteps
from lowbit_strategy.local_steps.outer_sync import OuterSync

_MOMENTS = ("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")


def begin(trainer: Any, session: Session, signals: DeferredSignals) -> None:
    """Prepare a Trainer when training begins, before `Session.resume`.

    1. `Session.finish` is called last in a fit, before any callback learns that training has ended.
    2. The Trainer checks SIGTERM on this rank, or on the ranks that share one model. Asking all ranks before every
       batch would make them wait for each other, and hang if one has fewer batches.
    3. Callbacks that average weights see the shared weights, not one rank's.
    """
    loop = trainer.fit_loop
    loop.on_run_end = partial(_finish, session, type(loop).on_run_end.__get__(loop))
    signals.answer_with(partial(_answer_signals, trainer, session, signals))
    for callback in filter(averages_weights, trainer.callbacks):
        for moment in _MOMENTS:
            original = getattr(type(callback), moment).__get__(callback)
            may_change = moment == "on_train_epoch_start"
            setattr(callback, moment, partial(_with_anchors, session, original, may_change))


def _answer_signals(trainer: Any, session: Session, signals: DeferredSignals) -> None:
    sync, outer = session.sync, session.sync.rounds
    if isinstance(outer, OuterSync):
        outer.asks = lambda: signals.has_received(REQUEUE)
        if outer.asked:
            outer.asked = False
            signals.run(REQUEUE)
    terminated = _terminated(trainer, signals) or trainer.received_sigterm
    if isinstance(session.pace, LocalSteps) and (inside := session.pace.inside) is not None:
        flag = torch.tensor([int(terminated)], device=sync.device)
        inside.all_reduce_max(flag).wait()
        terminated = bool(flag)
    if terminated:
        raise import_module(type(trainer.fit_loop.epoch_loop).__module__).SIGTERMException  # in either namespace


def _terminated(trainer: Any, signals: DeferredSignals) -> bool:
    """Whether this rank has been told to end, regardless of the others."""
    if not signals.has_received(TERMINATE):
        return False
    if trainer.strategy.launcher is not None:
        trainer.strategy.launcher.kill(signal.SIGTERM)
    trainer._signal_connector.received_sigterm = True
    signals.run(TERMINATE, own_only=True)
    return True


def _finish(session: Session, on_run_end: Callable[[], Any]) -> Any:
    session.finish()
    return on_run_end()


def _with_anchors(session: Session, moment: Callable[..., Any], may_change: bool, *args: Any, **kwargs: Any) -> None:
    """Run a callback with the anchors. `may_change`: training continues from weights that the callback may set."""
    with session.shared_weights(validates=False):
        moment(*args, **kwargs)
        if may_change and isinstance(session.pace, LocalSteps):
            session.pace.weights_replaced()
