"""Two levels of ranks: sums are exact inside a node, and compressed between the ranks of equal index on all nodes.

1. inside a node, each of its L ranks gets the node's mean of one part of every parameter, by an exact or coded
   reduce-scatter
2. ranks with the same part reduce it between the nodes, through a `GradientSync`
3. DDP: an exact all-gather inside the node gives all parts to all of its ranks

So each sum travels between nodes once per node instead of once per rank, and a rank keeps residuals for 1/L of the
model. Under DDP a part is a run of rows. Under FSDP2 with shards on all ranks, a part is the shards of all ranks with
the same index, and each of these ranks ends with its own shard.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.bucket_schedule import TURN, Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.node_means import Cut
from lowbit_strategy.ranks.ranks import Ranks


class TwoLevelBuckets:
    """DDP's buckets, reduced in place over two levels."""

    def __init__(self, sync: GradientSync) -> None:
        assert sync.ranks.intra_node is not None
        self._sync = sync
        self._intra_node = sync.ranks.intra_node
        self._cuts: dict[BucketLayout, Cut] = {}

    def reduce(self, layout: BucketLayout, x: Tensor) -> Stages:
        """Reduce one bucket; see `GradientSync.reduce`."""
        if layout not in self._cuts:
            self._cuts[layout] = Cut(layout, self._sync.state.full_specs, self._intra_node)
        cut = self._cuts[layout]
        part_N = torch.empty(cut.numel, dtype=x.dtype, device=x.device)
        between = self._sync.reduce(cut.layout, part_N, part_N)  # called now: the engine counts buckets
        return self._stages(cut, x, part_N, between)

    def _stages(self, cut: Cut, x: Tensor, part_N: Tensor, between: Stages) -> Stages:
        if x.is_cuda:
            part_N.record_stream(torch.cuda.current_stream(x.device))
        buffers = self._sync.buffers
        yield from self._sync.node_means[self._intra_node].mean(cut, x, part_N, buffers)
        yield from between
        yield TURN
        gathered = buffers.borrow(self._intra_node.world_size, part_N.nbytes)
        yield self._intra_node.all_gather(gathered.view(x.dtype), part_N)
        whole, pieces = cut.views(x, gathered.view(x.dtype))
        torch._foreach_copy_(whole, pieces)
        buffers.give_back(gathered)


class Phases(NamedTuple):
    """FSDP2's reduce-scatter over all ranks in two phases: inside the node, then the rest."""

    inside: Stages
    between: Stages


def reduce_scatter(
    sync: GradientSync,
    layout: BucketLayout,
    x: Tensor,
    out: Tensor,
    *,
    ranks: Ranks,
    overlaps: bool = False,
    marks: Tensor | None = None,
) -> Phases:
    """Reduce row r of `x` for rank r; `out` becomes the sum of this rank's row. With one level, the phase inside the
    node is empty.

    A module's rows are as large as its gradients, so all modules share borrowed memory for messages inside the node,
    unless another thread or stream reduces other modules between nodes at the same time (`overlaps`). `marks`, `ranks`:
    see `GradientSync.reduce`.
    """
    intra_node = ranks.intra_node
    if intra_node is None:
        return Phases(iter(()), sync.reduce(layout, x, out, marks, ranks=ranks))
    num_inside = intra_node.world_size
    mean_N = torch.empty(x.numel() // num_inside, dtype=x.dtype, device=x.device)
    between = sync.reduce(layout, mean_N, out, marks, ranks=ranks)  # called now: the engine counts buckets
    mean_GN = mean_N.view(-1, out.numel())
    buffers = None if overlaps else sync.buffers
    inside = sync.node_means[intra_node].mean_of_rows(layout, x, mean_GN, buffers)
    return Phases(inside, _summed(between, mean_N, out, num_inside))


def _summed(stages: Stages, mean_N: Tensor, out: Tensor, num_inside: int) -> Stages:
    """Turn means into sums, since FSDP2 divides by the number of all ranks."""
    if mean_N.is_cuda:  # allocated in the stream that reduces inside the node
        mean_N.record_stream(torch.cuda.current_stream(mean_N.device))
    yield from stages
    out.mul_(num_inside)
