"""Checks that a step's reductions send exactly the planned bytes."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.engine.bucket import Bucket


class ByteCheck:
    """Compares the bytes counted in each step with the buckets' plans, unless sizes depend on values.

    Codecs' messages must be right to the byte. Other methods may pad each parameter to 16 bytes on both hops.

    Attributes:
        expected: The step's buckets, in the order in which they come.
    """

    _comms: Sequence[Comm]

    def __init__(self) -> None:
        self.expected: list[Bucket] = []
        self._checks, self._before = False, 0  # a turn may arrive that was in flight when its run was saved

    def begin_step(self, comms: Sequence[Comm], *, checks: bool) -> None:
        """Begin a step whose buckets are reduced over `comms`. Called last in `begin_step`. `checks`: only the methods
        will send.
        """
        self._comms, self._checks = comms, checks
        self._before = sum(comm.sent_nbytes for comm in comms)

    def add_untracked(self, nbytes: int) -> None:
        """Add `nbytes` that were sent and belong to no bucket."""
        self._before += nbytes

    def end_step(self) -> None:
        """End the step, before anything else is sent at its end.

        Raises:
            RuntimeError: The number of bytes sent differs from the plan.
        """
        checks, self._checks = self._checks, False
        if not checks or not all(bucket.fixed for bucket in self.expected):  # or there was no step
            return
        counted = sum(comm.sent_nbytes for comm in self._comms) - self._before
        promised = sum(bucket.planned_nbytes for bucket in self.expected)
        padding = sum(bucket.padding_nbytes for bucket in self.expected)
        if abs(counted - promised) > padding:
            raise RuntimeError(
                f"{counted} bytes of gradients were sent in this step where {promised} and at most"
                f" {padding} of padding were planned: a method counts its bytes wrongly, please report it"
            )
