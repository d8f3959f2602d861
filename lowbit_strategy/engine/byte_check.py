"""The bytes that a step's reductions send are those that were planned."""

from __future__ import annotations

from collections.abc import Sequence

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.engine.bucket import Bucket


class ByteCheck:
    """Compares the communicator's count of each step with its buckets' plans, where those do not depend on values.

    Codecs' messages must be right to the byte. Other methods may pad each parameter to 16 bytes on both hops.

    Attributes:
        expected: The step's buckets, one by one as they come.
    """

    _comms: Sequence[Comm]

    def __init__(self) -> None:
        self.expected: list[Bucket] = []
        self._checks, self._before = False, 0  # a turn may arrive that was in flight when its run was saved

    def begin_step(self, comms: Sequence[Comm], *, checks: bool) -> None:
        """Call last in `begin_step`: buckets are reduced over `comms`. `checks`: only the methods will send."""
        self._comms, self._checks = comms, checks
        self._before = sum(comm.sent_nbytes for comm in comms)

    def add_untracked(self, nbytes: int) -> None:
        """`nbytes` have been sent that belong to no bucket."""
        self._before += nbytes

    def end_step(self) -> None:
        """Ends the step, before anything else that it sends when it ends.

        Raises:
            RuntimeError: More or less was sent than planned.
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
