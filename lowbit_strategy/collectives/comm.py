"""The collectives that gradients travel on, and the count of the bytes they put on the wire.

The only place that calls ``torch.distributed`` for gradients. Every method starts its collective and returns at once;
the caller waits on the returned handle (on CUDA that makes the current stream wait, not the host).
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_GRACE_S = 0.05

# gloo's threads need the GIL to let go of a collective that backward started (PyTorch 2.13). One that asks for it when
# the interpreter is already going down aborts the process, after all has been trained and saved. Asleep, this thread
# lets them have it before.
atexit.register(time.sleep, _GRACE_S)


class Pending(Protocol):
    """What a reducer yields while its bytes travel."""

    def wait(self) -> object: ...


class Comm:
    """A process group with counters.

    ``sent_nbytes`` grows by what this rank hands to other ranks: what it keeps for itself is not traffic.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.is_gloo = dist.get_backend(group) == "gloo"
        self.sent_nbytes = 0

    def all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        """Row r of `x_WB` goes to rank r; row r of `out_WB` comes from rank r."""
        self.sent_nbytes += x_WB[0].numel() * x_WB.element_size() * (self.world_size - 1)
        return dist.all_to_all_single(out_WB, x_WB, group=self.group, async_op=True)

    def all_to_all_uneven(self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> Pending:
        """Consecutive runs of `x` of `in_splits` elements go to the ranks in order."""
        self.sent_nbytes += (sum(in_splits) - in_splits[self.rank]) * x.element_size()
        return dist.all_to_all_single(out, x, list(out_splits), list(in_splits), group=self.group, async_op=True)

    def all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        """`x_B` of rank r becomes row r of `out_WB` on every rank."""
        self.sent_nbytes += x_B.numel() * x_B.element_size() * (self.world_size - 1)
        if self.is_gloo:  # gloo's all-gather of bytes is slower than its all-to-all of the same volume
            return dist.all_to_all_single(
                out_WB, x_B.expand(self.world_size, -1).contiguous(), group=self.group, async_op=True
            )
        return dist.all_gather_into_tensor(out_WB, x_B, group=self.group, async_op=True)

    def all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
        """In place. Counted as a ring: twice (W - 1) / W of the tensor."""
        self.sent_nbytes += 2 * (self.world_size - 1) * x.numel() * x.element_size() // self.world_size
        return dist.all_reduce(x, op=op, group=self.group, async_op=True)

    def all_reduce_max(self, x: Tensor) -> Pending:
        """In place, the largest of all ranks' values, element by element; they must not be NaN."""
        return self.all_reduce(x, dist.ReduceOp.MAX)

    def broadcast(self, x: Tensor, source: int) -> Pending:
        """In place, from group rank `source`."""
        if self.rank == source:
            self.sent_nbytes += x.numel() * x.element_size() * (self.world_size - 1)
        return dist.broadcast(x, group_src=source, group=self.group, async_op=True)


def wait_all(pending: Sequence[Pending]) -> None:
    for handle in pending:
        handle.wait()


def empty_wire(rows: int, nbytes: int, device: torch.device) -> Tensor:
    """uint8 [rows, nbytes] of zeros, so that padding never leaks memory to another rank."""
    return torch.zeros(rows, nbytes, dtype=torch.uint8, device=device)
