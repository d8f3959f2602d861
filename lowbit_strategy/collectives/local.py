"""One rank without a process group: to try a method on a tensor, to compile its kernels, to count its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending


class _Done:
    def wait(self) -> None:
        return None


class LocalComm(Comm):
    """Rank 0; every other rank is taken to send what this rank sends to itself. Every collective is done at once.

    Args:
        world_size: Ranks in all. With one, results are what the method makes of this rank's tensors alone.
    """

    counts: ClassVar[bool] = False

    def __init__(self, world_size: int = 1) -> None:
        super().__init__(rank=0, world_size=world_size)

    def all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        out_WB.copy_(x_WB[:1].expand_as(out_WB))
        return _Done()

    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Pending:
        out.view(self.world_size, -1).copy_(x[: in_splits[0]].expand(self.world_size, -1))
        return _Done()

    def all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        out_WB.view(self.world_size, -1).copy_(x_B.reshape(1, -1).expand(self.world_size, -1))
        return _Done()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        if op == dist.ReduceOp.SUM and self.world_size > 1:
            x.mul_(self.world_size)
        return _Done()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        return _Done()
