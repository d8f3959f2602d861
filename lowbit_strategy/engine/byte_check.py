"""Whether the bytes that were sent are those of the plan: what reports tell is then what travels."""

from __future__ import annotations

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.engine.bucket import Bucket


class ByteCheck:
    """Compares the communicator's count of each step with its buckets' plans, where those do not depend on values.

    Codecs' messages must be right to the byte. Other methods may pad each parameter to 16 bytes on both hops.

    Args:
        comm: That the buckets are reduced over.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._checks, self._before = False, 0  # a turn may arrive that was under way when its run was saved

    def begin_step(self, *, checks: bool) -> None:
        """Call last in `begin_step`. `checks`: only the methods will send in this step."""
        self._checks, self._before = checks and self._comm.counts, self._comm.sent_nbytes
        self._promised = self._padding = 0

    def expect(self, bucket: Bucket) -> None:
        """This bucket is going to be reduced."""
        self._checks &= bucket.fixed
        self._promised += bucket.planned_nbytes
        self._padding += bucket.padding_nbytes

    def add_untracked(self, nbytes: int) -> None:
        """`nbytes` have been sent that belong to no bucket."""
        self._before += nbytes

    def end_step(self) -> None:
        """Before anything else that a step sends when it ends.

        Raises:
            RuntimeError: More or less was sent than planned.
        """
        if not self._checks:  # or there was no step
            return
        self._checks = False
        counted = self._comm.sent_nbytes - self._before
        if abs(counted - self._promised) > self._padding:
            raise RuntimeError(
                f"{counted} bytes of gradients were sent in this step where {self._promised} and at most"
                f" {self._padding} of padding were planned: a method counts its bytes wrongly, please report it"
            )
