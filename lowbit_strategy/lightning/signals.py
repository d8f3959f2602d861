"""Signals that end or requeue a run, at a moment at which all ranks can answer. Independent of the Lightning namespace.

Lightning's handlers call collectives: SIGTERM's a broadcast, the one of SLURM's requeueing saves a checkpoint. A signal
comes between any two instructions of Python, on one rank during backward, on another in its forward pass, on some ranks
only. Then a rank waits in its handler for one that waits for its gradients. So a signal is only noted when it comes; at
the start of the next batch the ranks tell each other what has come, and then all of them run the handlers together.

Where ranks are far apart they begin to tell each other before a backward pass, so that the answers travel beside the
gradients and nobody waits for them. Where they are near that would save nothing, and a rank that is lost between two
steps is named by this exchange, not by DDP's own in the forward pass, which knows no names.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.lost_ranks import naming_lost_ranks

_REQUEUE = 2  # bits: of SIGTERM, of the requeue signal
_TERMINATE = 1


def _naming_lost_ranks() -> contextlib.AbstractContextManager[None]:
    return naming_lost_ranks(None, "asking all ranks for signals", "")


class DeferredSignals:
    """Args:
    trainer: Whose handlers are called later. They must have been registered, which is after set-up.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._handlers: dict[int, list[Any]] = {}
        self._received = 0
        self._answered = 0  # before they have come here: a scheduler signals all ranks, but not in one moment
        self._answers: tuple[Tensor, Any] | None = None  # of all ranks, on their way

    def install(self) -> None:
        """Take the place of the Trainer's handlers; further calls do nothing. The Trainer removes them with its own."""
        if threading.current_thread() is not threading.main_thread() or self.trainer.world_size == 1:
            return
        for bit, signum in self._signals().items():
            handlers = getattr(signal.getsignal(signum), "signal_handlers", [])
            if any(self._is_trainers(handler) for handler in handlers):
                self._handlers[bit] = list(handlers)
                signal.signal(signum, self._note)

    def _signals(self) -> dict[int, signal.Signals]:
        environment = self.trainer._accelerator_connector.cluster_environment
        requeue = getattr(environment, "requeue_signal", None) if getattr(environment, "auto_requeue", False) else None
        return {_TERMINATE: signal.SIGTERM} | ({} if requeue is None else {_REQUEUE: requeue})

    def _is_trainers(self, handler: Any) -> bool:
        return getattr(handler, "__self__", None) is self.trainer._signal_connector

    def _note(self, signum: int, frame: Any) -> None:
        bit = next(bit for bit, each in self._signals().items() if each == signum)
        self._received |= bit & ~self._answered
        self._answered &= ~bit

    def ask(self) -> None:
        """Before a backward pass, on all ranks: begin to ask what any has received, unless that is under way."""
        if self._answers is not None or self.trainer.world_size == 1:
            return
        device = self.trainer.strategy.root_device
        mine_W = torch.full((self.trainer.world_size,), self._received, dtype=torch.uint8, device=device)
        all_W = torch.empty_like(mine_W)
        with _naming_lost_ranks():  # an all-reduce takes longer
            self._answers = all_W, dist.all_to_all_single(all_W, mine_W, async_op=True)

    def _hear(self) -> list[int]:
        """What each rank had received when it was asked last."""
        assert self._answers is not None
        (all_W, work), self._answers = self._answers, None
        with _naming_lost_ranks():
            work.wait()
        return list(all_W.tolist())

    def begin(self) -> None:
        """Training begins. What an earlier fit has asked, which an error ended, is not waited for."""
        self._answers = None

    def finish(self) -> None:
        """Training has ended on all ranks: nothing stays on its way."""
        if self._answers is not None:
            self._hear()

    def agree(self, stop: Callable[[], None]) -> None:
        """Start of a batch, on all ranks: run the handlers of what any rank had received when it was asked.

        Args:
            stop: Ends training on all ranks if the Trainer has been terminated.
        """
        self.ask()  # unless that is under way
        wanted = self._hear()
        if any(value & _REQUEUE for value in wanted):
            self._run(_REQUEUE)
        if any(value & _TERMINATE for value in wanted):
            self._run(_TERMINATE)
            stop()

    @property
    def asks_to_requeue(self) -> bool:
        """Whether this rank has received the requeue signal and has not answered it yet."""
        return bool(self._received & _REQUEUE)

    @property
    def asks_to_end(self) -> bool:
        """Whether this rank has received SIGTERM and has not answered it yet."""
        return bool(self._received & _TERMINATE)

    def requeue(self) -> None:
        """Local steps: all ranks have learned that one of them has received the signal."""
        self._run(_REQUEUE)

    def terminate_alone(self) -> bool:
        """Local steps, where the other ranks may be elsewhere: whether this rank has been terminated."""
        if not self._received & _TERMINATE:
            return False
        connector, launcher = self.trainer._signal_connector, self.trainer.strategy.launcher
        if launcher is not None:
            launcher.kill(signal.SIGTERM)
        connector.received_sigterm = True
        self._run(_TERMINATE, own_only=True)
        return True

    def _run(self, bit: int, *, own_only: bool = False) -> None:
        """The Trainer's handlers on every rank, others where the signal has come."""
        received, self._received = bool(self._received & bit), self._received & ~bit
        if not received:
            self._answered |= bit
        for handler in self._handlers.get(bit, ()):
            chosen = not own_only if self._is_trainers(handler) else received
            if chosen and callable(handler):
                handler(self._signals()[bit], None)
