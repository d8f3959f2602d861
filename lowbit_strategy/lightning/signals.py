"""Defers signals that end or requeue a run until all ranks can handle them.

Lightning's handlers call collectives: the one for SIGTERM broadcasts, the one for SLURM's requeueing saves a
checkpoint. A signal may arrive between any two Python instructions, on one rank during backward, on another in its
forward pass, or on some ranks only. Then a rank would wait in its handler for a rank that waits for its gradients. So a
signal is only noted when it arrives. At the start of the next batch the ranks tell each other what has arrived, and
then all of them run the handlers together.

Far ranks begin this exchange before a backward pass, so that the answers travel with the gradients and no rank waits
for them. For near ranks that would save nothing, and this exchange can name a rank that was lost between two steps,
which DDP's exchange in the forward pass cannot.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import naming_lost_ranks

TERMINATE, REQUEUE = 1, 2  # bits of a message
_naming_lost_ranks = functools.partial(naming_lost_ranks, None, "asking all ranks for signals")


class DeferredSignals:
    """Notes signals, and runs the Trainer's handlers on all ranks together.

    Args:
        trainer: The Trainer whose handlers are called later. They must have been registered, which happens after
            set-up.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        environment = trainer._accelerator_connector.cluster_environment
        requeue = getattr(environment, "requeue_signal", None) if getattr(environment, "auto_requeue", False) else None
        self._signals = {TERMINATE: signal.SIGTERM} | ({} if requeue is None else {REQUEUE: requeue})
        self._handlers: dict[int, list[Any]] = {}
        self._received = 0
        self._answered = 0  # signals answered before they arrived here: ranks get them at different times
        self._answers: tuple[Tensor, Any] | None = None  # all ranks' answers, in flight

    def install(self) -> None:
        """Replace the Trainer's handlers; further calls do nothing. The Trainer removes ours together with its own."""
        if threading.current_thread() is not threading.main_thread() or self.trainer.world_size == 1:
            return
        for bit, signum in self._signals.items():
            handlers = getattr(signal.getsignal(signum), "signal_handlers", [])
            if any(self._is_trainers(handler) for handler in handlers):
                self._handlers[bit] = list(handlers)
                signal.signal(signum, functools.partial(self._note, bit))

    def _is_trainers(self, handler: Any) -> bool:
        return getattr(handler, "__self__", None) is self.trainer._signal_connector

    def _note(self, bit: int, *_: Any) -> None:
        self._received |= bit & ~self._answered
        self._answered &= ~bit

    def has_received(self, bit: int) -> bool:
        """Whether this rank has received the signal and not handled it yet."""
        return bool(self._received & bit)

    def begin(self) -> None:
        """Begin training. Do not wait for answers from an earlier fit that ended with an error."""
        self._answers = None

    def ask(self) -> None:
        """Begin to ask all ranks which signals they have received, if that is not under way. Call it before a backward
        pass, on all ranks.
        """
        if self._answers is not None or self.trainer.world_size == 1:
            return
        device = self.trainer.strategy.root_device
        mine_W = torch.full((self.trainer.world_size,), self._received, dtype=torch.uint8, device=device)
        all_W = torch.empty_like(mine_W)
        with _naming_lost_ranks():  # an all-reduce takes longer
            self._answers = all_W, dist.all_to_all_single(all_W, mine_W, async_op=True)

    def finish(self) -> list[int]:
        """Wait for the answers under way, if any: the signals that each rank had received when it was asked."""
        if self._answers is None:
            return []
        (all_W, work), self._answers = self._answers, None
        with _naming_lost_ranks():
            work.wait()
        return list(all_W.tolist())

    def answer_with(self, answer: Callable[[], None]) -> None:
        """Call `answer` at the start of each batch, where the Trainer asks whether rank 0 has been terminated."""
        self.trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = answer

    def agree(self) -> None:
        """Run the handlers of signals that any rank had received when asked, and end training if one of them was
        SIGTERM. Called when a batch starts, on all ranks.
        """
        self.ask()
        received = self.finish()
        if any(each & REQUEUE for each in received):
            self.run(REQUEUE)
        if any(each & TERMINATE for each in received):
            self.run(TERMINATE)
            loop = self.trainer.fit_loop.epoch_loop
            type(loop)._broadcast_sigterm_tensor(loop)

    def run(self, bit: int, *, own_only: bool = False) -> None:
        """Run the Trainer's handlers on every rank, and other handlers only where the signal arrived. `own_only`:
        leave out the Trainer's.
        """
        received = self.has_received(bit)
        self._received &= ~bit
        if not received:
            self._answered |= bit
        with self._one_path() if bit == REQUEUE else contextlib.nullcontext():
            for handler in self._handlers.get(bit, ()):
                chosen = not own_only if self._is_trainers(handler) else received
                if chosen and callable(handler):
                    handler(self._signals[bit], None)

    @contextlib.contextmanager
    def _one_path(self) -> Iterator[None]:
        """A context in which all ranks save a requeued job's checkpoint at rank 0's path. The Trainer lets each rank
        number it by the folder's content, and another rank may have written its residuals there already.
        """
        connector = self.trainer._checkpoint_connector
        path = self.trainer.strategy.broadcast(connector.hpc_save_path(self.trainer.default_root_dir))
        connector.hpc_save_path = lambda _: path
        try:
            yield
        finally:
            del connector.hpc_save_path
