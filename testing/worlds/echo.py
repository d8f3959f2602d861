"""A world of any size on one rank: every other rank is taken to send what this rank sends itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowbit_strategy.collectives.comm import Comm, Pending


class _Arrived:
    def wait(self) -> None:
        return None


class EchoComm(Comm):
    """Rank 0 of any number. Collectives count as none of the operations that a dispatch mode sees."""

    def __init__(self, world_size: int) -> None:
        super().__init__(rank=0, world_size=world_size)

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        with _disable_current_modes():
            out_WB.copy_(x_WB[:1].expand_as(out_WB))
        return _Arrived()

    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        raise NotImplementedError("not needed by codecs")

    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        with _disable_current_modes():
            out_WB.view(self.world_size, -1).copy_(x_B.reshape(1, -1).expand(self.world_size, -1))
        return _Arrived()

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        return _Arrived()

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return _Arrived()


class Operations(TorchDispatchMode):
    """The ATen operations of what runs inside, in order; `check` sees each before it runs."""

    def __init__(self, check: Callable[[Any, tuple[Any, ...]], None] | None = None) -> None:
        super().__init__()
        self.names: list[str] = []
        self._check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "prim":  # a question to a tensor that holds nothing
            self.names.append(str(func))
        if self._check is not None:
            self._check(func, args)
        return func(*args, **(kwargs or {}))
