"""A world of one rank without a process group: to try a method on a tensor, and to see what it sends of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending


class _Done:
    def wait(self) -> None:
        return None


class LocalComm(Comm):
    """Rank 0 of 1. Every collective is done when it returns, and nothing is sent."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)

    def all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        out_WB.copy_(x_WB)
        return _Done()

    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Pending:
        out.copy_(x)
        return _Done()

    def all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        out_WB.view(-1).copy_(x_B.reshape(-1))
        return _Done()

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        return _Done()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        return _Done()
