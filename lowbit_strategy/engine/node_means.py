"""Means over the ranks of one node, which are then reduced between nodes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, dim0_row_numel, row_length
from lowbit_strategy.collectives.ordered import sum_rows
from lowbit_strategy.collectives.step_flags import StepFlags
from lowbit_strategy.collectives.wire_buffers import WireBuffers
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.bucket_schedule import Stages


class Cut:
    """How a DDP bucket is cut into one part per rank of a node. All parts of a bucket have the same size.

    Attributes:
        layout: Layout of this rank's part, between nodes.
        numel: Elements of a part.
        params: The places of parameters in the bucket and in this rank's part.
    """

    def __init__(self, layout: BucketLayout, full_specs: Mapping[str, TensorSpec], intra_node: Comm) -> None:
        self._parts: list[tuple[int, int, int, int]] = []  # rank, offset in the bucket, offset in its part, elements
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


class NodeMeans:
    """Exact means, added in float32 and in rank order. A subclass may code them (`ranks.NodeCoding`).

    Attributes:
        flags: Records messages with a different layout.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self._comm = comm
        self.flags = StepFlags(device)

    def mean(self, cut: Cut, x: Tensor, part_N: Tensor, buffers: WireBuffers) -> Stages:
        """Write the mean of this rank's part of a DDP bucket `x` into `part_N`; yields while bytes travel."""
        num_ranks = self._comm.world_size
        sent = buffers.borrow(num_ranks, cut.numel * x.element_size())
        whole, pieces = cut.views(x, sent.view(x.dtype))
        torch._foreach_copy_(pieces, whole)
        sent_LGN = sent.view(x.dtype).view(num_ranks, 1, -1)
        yield from sum_rows(sent_LGN, part_N.view(1, -1), self._comm, alpha=1.0 / num_ranks, buffers=buffers)
        buffers.give_back(sent)

    def mean_of_rows(
        self, layout: BucketLayout, x: Tensor, out_GN: Tensor, buffers: WireBuffers | None = None
    ) -> Stages:
        """The same for FSDP2's rows, one per rank of G nodes, or of this node only."""
        rows_LGN = x.view(len(out_GN), self._comm.world_size, -1).transpose(0, 1)
        return sum_rows(rows_LGN, out_GN, self._comm, alpha=1.0 / self._comm.world_size, buffers=buffers)

    def end_step(self) -> None:
        """On CUDA, raise a RuntimeError if a rank of the node sent a message with a different layout earlier."""
