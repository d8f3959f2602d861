"""The books of a step: reductions that are prepared, then committed or rolled back, and the bytes that they send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.exchange import StepFlags
from lowbit_strategy.engine.bucket import Bucket
from lowbit_strategy.engine.method_state import MethodState


class Transactions:
    """The open reductions of one model, one per parameter.

    1. A reduction is *prepared* in backward. The passes of an accumulated gradient are one reduction.
    2. It is *committed* when an optimizer steps its parameter.
    3. It is *rolled back* when its gradient is thrown away: a loss scaler skips the step, the gradient is cleared
       without a step, or an exchange fails. The method's state is then what it was before 1.

    Rolling back needs a copy of the state. It is kept for every parameter if `keeps_all`, otherwise for parameters
    whose gradients have been thrown away before: the first such reduction of a parameter is not taken back.

    Args:
        state: What methods keep between steps.
        flags: What buckets have found; made in the stream of training, as this is.
        keeps_all: Any reduction may be thrown away.

    Attributes:
        byte_check: Byte check of the step.
        prepared: Parameters with an open reduction.
        thrown_away: Parameters whose gradients have been thrown away before.
    """

    def __init__(self, state: MethodState, flags: StepFlags, *, keeps_all: bool) -> None:
        self.flags, self.keeps_all = flags, keeps_all
        self.byte_check = ByteCheck()
        self._state = state
        self.prepared: set[str] = set()
        self.thrown_away: set[str] = set()
        self._kept: set[str] = set()  # of those prepared: the state before is in `_copies`
        self._copies: dict[str, list[Tensor]] = {}

    def to_keep(self, names: Iterable[str]) -> list[str]:
        """Of parameters that are going to be prepared, those whose state has to be kept (`keep`) before that."""
        return [name for name in names if (self.keeps_all or name in self.thrown_away) and name not in self.prepared]

    def keep(self, names: Sequence[str]) -> None:
        """The state of these parameters is about to change: copy it. In the stream and thread that change it."""
        for name in names:
            if name not in self._copies:
                self._copies[name] = [torch.empty_like(tensor) for tensor in self._live(name)]
        self._copy_(self._copies, {name: self._live(name) for name in names})
        self._kept |= self.prepared.intersection(names)

    def commit(self, names: Iterable[str] | None = None) -> None:
        """An optimizer has stepped these parameters; None: all."""
        self._state.carryover.commit(self._close(names))

    def roll_back(self, names: Iterable[str] | None = None) -> list[str]:
        """The gradients of these parameters were thrown away; None: of all. Returns those whose state was restored."""
        kept = self._kept.copy()
        closed = self._close(names)
        restored = [name for name in self._state.specs if name in closed and name in kept]
        self._copy_({name: self._live(name) for name in restored}, self._copies)
        self._state.carryover.roll_back(closed)
        self.thrown_away |= closed
        return restored

    def forget(self) -> None:
        """Methods or their state have been changed: what is open is committed, copies are dropped."""
        if self.prepared:
            self.commit()
        self._copies = {}

    def _close(self, names: Iterable[str] | None) -> set[str]:
        """Close the reductions of `names` that are open, and return them."""
        closed = self.prepared.copy() if names is None else self.prepared.intersection(names)
        self.prepared -= closed
        self._kept -= closed
        return closed

    def _live(self, name: str) -> list[Tensor]:
        return list(self._state.tensors(name).values())

    @staticmethod
    def _copy_(targets: dict[str, list[Tensor]], sources: dict[str, list[Tensor]]) -> None:
        """Of the parameters that both have."""
        names = targets.keys() & sources.keys()
        into = [tensor for name in names for tensor in targets[name]]
        if into:  # dense and stateless methods have no state
            torch._foreach_copy_(into, [tensor for name in names for tensor in sources[name]])


class ByteCheck:
    """Compares the communicator's count of each step with its buckets' plans, where those do not depend on values.

    Codecs' messages must be right to the byte. Other methods may pad each parameter to 16 bytes on both hops.

    Attributes:
        expected: The step's buckets, one by one as they come.
    """

    _comm: Comm

    def __init__(self) -> None:
        self.expected: list[Bucket] = []
        self._checks, self._before = False, 0  # a turn may arrive that was in flight when its run was saved

    def begin_step(self, comm: Comm, *, checks: bool) -> None:
        """Call last in `begin_step`: buckets are reduced over `comm`. `checks`: only the methods will send."""
        self._comm, self._checks, self._before = comm, checks, comm.sent_nbytes

    def add_untracked(self, nbytes: int) -> None:
        """`nbytes` have been sent that belong to no bucket."""
        self._before += nbytes

    def end_step(self) -> None:
        """Before anything else that a step sends when it ends.

        Raises:
            RuntimeError: More or less was sent than planned.
        """
        checks, self._checks = self._checks, False
        if not checks or not all(bucket.fixed for bucket in self.expected):  # or there was no step
            return
        counted = self._comm.sent_nbytes - self._before
        promised = sum(bucket.planned_nbytes for bucket in self.expected)
        padding = sum(bucket.padding_nbytes for bucket in self.expected)
        if abs(counted - promised) > padding:
            raise RuntimeError(
                f"{counted} bytes of gradients were sent in this step where {promised} and at most"
                f" {padding} of padding were planned: a method counts its bytes wrongly, please report it"
            )
