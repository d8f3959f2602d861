"""The collectives of a group whose members may be lost, which torch.distributed does not know by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending, UnderWay, ring_nbytes


class ExchangeFailedError(RuntimeError):
    """A member has been lost in an exchange, or does not answer."""


class MemberComm(Comm):
    """The collectives of a gloo group that is made anew when members change, the same as those of `GroupComm`.

    Args:
        members: The group.
    """

    def __init__(self, members: dist.ProcessGroup) -> None:
        super().__init__(members.rank(), members.size())
        self._members = members

    def all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        self.sent_nbytes += x_WB[0].numel() * x_WB.element_size() * (self.world_size - 1)
        return self._all_to_all(out_WB, x_WB, [], [])

    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Pending:
        self.sent_nbytes += (sum(in_splits) - in_splits[self.rank]) * x.element_size()
        return self._all_to_all(out, x, list(out_splits), list(in_splits))

    def all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        self.sent_nbytes += x_B.numel() * x_B.element_size() * (self.world_size - 1)
        return self._all_to_all(out_WB, x_B.reshape(1, -1).expand(self.world_size, -1).contiguous(), [], [])

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        self.sent_nbytes += ring_nbytes(x, self.world_size)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        return self._begin("allreduce", [x], options)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        if self.rank == source:
            self.sent_nbytes += x.numel() * x.element_size() * (self.world_size - 1)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        return self._begin("broadcast", [x], options)

    def send(self, x: Tensor, target: int) -> Pending:
        """To one member, which receives it."""
        self.sent_nbytes += x.nbytes
        return self._begin("send", [x], target, 0)

    def receive(self, x: Tensor, source: int) -> Pending:
        """What one member sends."""
        return self._begin("recv", [x], source, 0)

    def _all_to_all(self, out: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int]) -> Pending:
        return self._begin("alltoall_base", out, x, out_splits, in_splits, dist.AllToAllOptions())

    def _begin(self, operation: str, *values: Any) -> Pending:
        with as_failed_exchange():
            return UnderWay(getattr(self._members, operation)(*values), as_failed_exchange)


@contextlib.contextmanager
def as_failed_exchange() -> Iterator[None]:
    """Raises:
    ExchangeFailedError: What torch has raised inside.
    """
    try:
        yield
    except RuntimeError as error:  # torch's own are derived from it
        raise ExchangeFailedError(str(error).splitlines()[0]) from error
