"""Whether the bytes that were sent are those that the methods promise: what reports say is then what travels."""

from __future__ import annotations

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.exchange import HEADER_NBYTES
from lowbit_strategy.collectives.layout import ALIGNMENT
from lowbit_strategy.engine.bucket import Bucket
from lowbit_strategy.methods._base.reducer import Reducer


class ByteCheck:
    """Compares the communicator's count of each step with the promises, where those do not depend on values.

    A bucket may cost more than promised by its framing: a header per message, and each parameter's padding to 16 bytes.

    Args:
        comm: That the buckets are reduced over.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._checks = False

    def begin_step(self, *, checks: bool) -> None:
        """After everything else that a step begins with. `checks`: nothing but the methods will send in this step."""
        self._checks, self._before = checks and self._comm.counts, self._comm.sent_nbytes
        self._promised = self._framing = 0

    def expect(self, bucket: Bucket) -> None:
        """This bucket is going to be reduced."""
        context, peers = bucket.context, self._comm.world_size - 1
        for slot in bucket.slots:
            method, spec = context.methods[slot.name], context.specs[slot.name]
            self._checks &= not isinstance(method, Reducer) or method.fixed_size
            self._promised += method.wire_nbytes(spec, self._comm.world_size, scatter=context.placement.scatter)
        self._framing += 2 * peers * (HEADER_NBYTES + ALIGNMENT * len(bucket.slots))

    def besides(self, nbytes: int) -> None:
        """So many bytes have been sent that are no bucket's."""
        self._before += nbytes

    def end_step(self) -> None:
        """Before anything else that a step sends when it ends.

        Raises:
            RuntimeError: More or less was sent than promised.
        """
        if not self._checks:  # or there was no step
            return
        self._checks = False
        counted = self._comm.sent_nbytes - self._before
        if abs(counted - self._promised) > self._framing:
            raise RuntimeError(
                f"{counted} bytes of gradients were sent in this step where {self._promised} and at most"
                f" {self._framing} for headers were announced: a method counts its bytes wrongly, please report it"
            )
