"""W ranks in one process: the real engines and methods, collectives by copying. For quality, not for time.

Make one `GradientSync` on each of `SimulatedWorld.comms`, then reduce with all of them at once: every rank gets the
bits that it would get from real processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync


class _Exchanged:
    """A handle whose bytes have arrived once every rank has started the same collective."""

    def __init__(self, world: SimulatedWorld) -> None:
        self._world = world

    def wait(self) -> None:
        if self._world.posted:
            raise RuntimeError("a simulated rank waits for ranks that have not started this collective")


class SimulatedComm(Comm):
    """One rank of a `SimulatedWorld`, with the counters of the real communicator."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        return self.world.post(self.rank, (out_WB, x_WB), _all_to_all)

    def _all_to_all_uneven(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
    ) -> Pending:
        return self.world.post(self.rank, (out.split(list(out_splits)), x.split(list(in_splits))), _all_to_all)

    def _all_gather(self, out_WB: Tensor, x_B: Tensor) -> Pending:
        return self.world.post(self.rank, (out_WB, x_B), _all_gather)

    def _all_reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Pending:
        return self.world.post(self.rank, (x, x), _maximum if op == dist.ReduceOp.MAX else _sum)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        return self.world.post(self.rank, (x, x), lambda buffers: _broadcast(buffers, source))


Buffers = list[tuple[Any, Any]]  # of every rank: out, in; a tensor each, or tensors


class SimulatedWorld:
    """Ranks that take turns: a collective happens when the last one starts it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.comms = [SimulatedComm(self, rank) for rank in range(size)]
        self.posted: dict[int, tuple[Any, Any]] = {}

    def post(self, rank: int, buffers: tuple[Any, Any], move: Callable[[Buffers], None]) -> Pending:
        assert rank not in self.posted
        self.posted[rank] = buffers
        if len(self.posted) == self.size:
            move([self.posted[r] for r in range(self.size)])
            self.posted.clear()
        return _Exchanged(self)

    def reduce(
        self, syncs: Sequence[GradientSync], layout: BucketLayout, buffers: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> None:
        """Reduce every rank's bucket into its `outs`; ends the step."""
        for sync in syncs:
            sync.begin_step()
        stages = [sync.reduce(layout, x, out) for sync, x, out in zip(syncs, buffers, outs, strict=True)]
        for pending in itertools.zip_longest(*stages):
            for handle in pending:
                if handle is not None:
                    handle.wait()
        for sync in syncs:
            sync.end_step()


def _all_to_all(buffers: Buffers) -> None:
    for receiver, (out, _) in enumerate(buffers):
        for sender, (_, x) in enumerate(buffers):
            out[sender].copy_(x[receiver])


def _all_gather(buffers: Buffers) -> None:
    for out, _ in buffers:
        for sender, (_, x) in enumerate(buffers):
            out[sender].copy_(x)


def _sum(buffers: Buffers) -> None:
    _overwrite(buffers, sum(x for _, x in buffers))


def _maximum(buffers: Buffers) -> None:
    _overwrite(buffers, torch.stack([x for _, x in buffers]).amax(0))


def _broadcast(buffers: Buffers, source: int) -> None:
    _overwrite(buffers, buffers[source][1].clone())


def _overwrite(buffers: Buffers, value: Tensor) -> None:
    for out, _ in buffers:
        out.copy_(value)
