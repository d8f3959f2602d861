"""Two levels of ranks: sums are exact inside a node, and compressed between the ranks of equal index on all nodes.

1. inside a node each of its L ranks gets one part of every parameter, the mean over the node: an exact reduce-scatter,
   or one of codes (`NodeMeans`)
2. ranks with the same part reduce it between the nodes, through a `GradientSync`
3. DDP: inside the node all ranks get all parts, an exact all-gather

So between nodes every sum travels once per node instead of once per rank, and a rank keeps residuals for 1/L of the
model. Under DDP a part is a run of rows; under FSDP2, sharded over all ranks, it is the shards of all ranks that have
the same index, and each of them ends with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, dim0_row_numel, row_length
from lowbit_strategy.collectives.ordered import sum_rows
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.schedule import TURN, Stages
from lowbit_strategy.ranks.ranks import Ranks


class _Partition:
    """How a bucket of DDP is cut into the parts of the ranks of a node. All parts of a bucket have one size.

    Attributes:
        layout: Layout of this rank's part, between nodes.
        numel: Elements of a part.
        params: Where parameters lie in the bucket, and in the own part.
    """

    def __init__(self, layout: BucketLayout, full_specs: Mapping[str, TensorSpec], intra_node: Comm) -> None:
        self._parts: list[tuple[int, int, int, int]] = []  # rank, offset in the bucket and in its part, elements
        entries: list[tuple[str, int]] = []
        self.params: list[ParamView] = []
        self.numel = 0
        for name, offset in layout.entries:
            spec = full_specs[name]
            in_memory = spec.shape if spec.memory_order is None else tuple(spec.shape[dim] for dim in spec.memory_order)
            row_numel = dim0_row_numel(in_memory, intra_node.world_size)
            self.params.append(
                ParamView(spec, intra_node.world_size, row_numel, offset, row_numel, out_offset=self.numel)
            )
            for r in range(intra_node.world_size):
                if length := row_length(spec.numel, row_numel, r):
                    self._parts.append((r, offset + r * row_numel, self.numel, length))
            if row_length(spec.numel, row_numel, intra_node.rank):
                entries.append((name, self.numel))
            self.numel += min(row_numel, spec.numel)
        self.layout = BucketLayout(tuple(entries), last=layout.last, names=tuple(name for name, _ in layout.entries))

    def views(self, x: Tensor, parts_LN: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Each rank's part of each parameter, in the bucket and among the parts."""
        whole = [x[offset : offset + length] for _, offset, _, length in self._parts]
        parts = [parts_LN[r, at : at + length] for r, _, at, length in self._parts]
        return whole, parts


class TwoLevelBuckets:
    """DDP's buckets, reduced in place over two levels.

    Args:
        sync: Reduces parts between nodes.
    """

    def __init__(self, sync: GradientSync) -> None:
        assert sync.ranks.intra_node is not None
        self._sync = sync
        self._intra_node = sync.ranks.intra_node
        self._partitions: dict[BucketLayout, _Partition] = {}

    def reduce(self, layout: BucketLayout, x: Tensor) -> Stages:
        """Reduce one bucket; see `GradientSync.reduce`."""
        if layout not in self._partitions:
            if len(self._partitions) >= _KEPT:
                self._partitions.clear()
            self._partitions[layout] = _Partition(layout, self._sync.state.full_specs, self._intra_node)
        partition = self._partitions[layout]
        part_N = torch.empty(partition.numel, dtype=x.dtype, device=x.device)
        between = self._sync.reduce(partition.layout, part_N, part_N)  # now: the engine counts buckets as they come
        return self._stages(partition, x, part_N, between)

    def _stages(self, partition: _Partition, x: Tensor, part_N: Tensor, between: Stages) -> Stages:
        if x.is_cuda:
            part_N.record_stream(torch.cuda.current_stream(x.device))
        buffers, row_nbytes = self._sync.buffers, partition.numel * x.element_size()
        num_inside = self._intra_node.world_size
        if (codes := self._sync.node_codes.get(self._intra_node)) is not None:
            yield from codes.mean(partition.layout, lambda: partition.params, x, part_N, buffers)
        else:
            sent = buffers.borrow(num_inside, row_nbytes)
            whole, pieces = partition.views(x, sent.view(x.dtype))
            torch._foreach_copy_(pieces, whole)
            yield from sum_rows(
                sent.view(x.dtype).view(num_inside, 1, -1),
                part_N.view(1, -1),
                self._intra_node,
                alpha=1.0 / num_inside,
                buffers=buffers,
            )
            buffers.give_back(sent)
        yield from between
        yield TURN
        gathered = buffers.borrow(num_inside, row_nbytes)
        yield self._intra_node.all_gather(gathered.view(x.dtype), part_N)
        whole, pieces = partition.views(x, gathered.view(x.dtype))
        torch._foreach_copy_(whole, pieces)
        buffers.give_back(gathered)


_KEPT = 256  # DDP rebuilds its buckets once or twice


class Scatter(NamedTuple):
    """FSDP2's reduce-scatter over all ranks, in two parts that follow each other: inside the node, and the rest."""

    inside: Stages
    between: Stages


def scatter(
    sync: GradientSync,
    layout: BucketLayout,
    x: Tensor,
    out: Tensor,
    *,
    ranks: Ranks,
    overlaps: bool = False,
    marks: Tensor | None = None,
) -> Scatter:
    """Row r of `x` is for rank r, `out` is the sum of the own row. Over one level there is nothing inside.

    A module's rows are as large as its gradients: what is sent at a time inside the node is borrowed, so that all
    modules share it, unless other modules are reduced between the nodes meanwhile (`overlaps`), by another thread or in
    another stream. `marks`, `ranks`: as for `GradientSync.reduce`.
    """
    intra_node = ranks.intra_node
    if intra_node is None:
        return Scatter(iter(()), sync.reduce(layout, x, out, marks, ranks=ranks))
    num_inside = intra_node.world_size
    mean_N = torch.empty(x.numel() // num_inside, dtype=x.dtype, device=x.device)
    between = sync.reduce(layout, mean_N, out, marks, ranks=ranks)  # now: the engine counts buckets as they come
    mean_GN = mean_N.view(-1, out.numel())
    inside: Stages
    if (codes := sync.node_codes.get(intra_node)) is not None:
        inside = codes.mean_of_rows(layout, [name for name, _ in layout.entries], x, mean_GN)
    else:
        rows_LGN = x.view(-1, num_inside, out.numel()).transpose(0, 1)
        buffers = None if overlaps else sync.buffers
        inside = sum_rows(rows_LGN, mean_GN, intra_node, alpha=1.0 / num_inside, buffers=buffers)
    return Scatter(inside, _summed(between, mean_N, out, num_inside))


def _summed(stages: Stages, mean_N: Tensor, out: Tensor, num_inside: int) -> Stages:
    """FSDP2 divides by the number of all ranks."""
    if mean_N.is_cuda:  # allocated in the stream of what is done inside the node
        mean_N.record_stream(torch.cuda.current_stream(mean_N.device))
    yield from stages
    out.mul_(num_inside)
