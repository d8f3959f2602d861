"""The transport between members that may be lost in the middle of an exchange."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending, UnderWay


class ExchangeFailedError(RuntimeError):
    """A member was lost in an exchange or does not answer."""


class MemberComm(Comm):
    """The collectives of `GroupComm` for a gloo group that is recreated when members change.

    Args:
        members: The group.
    """

    def __init__(self, members: dist.ProcessGroup) -> None:
        super().__init__(members.rank(), members.size())
        self._members = members

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        return self._all_to_all_uneven(out_WB, x_WB, [], [])

    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        splits = list(out_splits), list(in_splits)
        return self._begin("alltoall_base", out, x, *splits, dist.AllToAllOptions())

    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        return self._all_to_all_uneven(out_WB, x_B.reshape(1, -1).expand(self.world_size, -1).contiguous(), [], [])

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return self._begin("allreduce", [x], options)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._begin("broadcast", [x], options)

    def send(self, x: Tensor, target: int) -> Pending:
        """Send `x` to one member, which must receive it."""
        self.sent_nbytes += x.nbytes
        return self._begin("send", [x], target, 0)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Receive a tensor from one member."""
        return self._begin("recv", [x], source, 0)

    def _begin(self, operation: str, *values: Any) -> Pending:
        with as_failed_exchange():
            return UnderWay(getattr(self._members, operation)(*values), as_failed_exchange)


@contextlib.contextmanager
def as_failed_exchange() -> Iterator[None]:
    """A context that turns torch's errors into an ExchangeFailedError."""
    try:
        yield
    except RuntimeError as error:  # torch's own are derived from it
        raise ExchangeFailedError(str(error).splitlines()[0]) from error
