"""Treats all parameters of a step as one flat model, in which each rank selects from its own partition."""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.collectives.sparse_layout import POSITION_NBYTES, damaged_message, joined, sparse_layout
from lowbit_strategy.kernels.select import (
    TINY,
    OverflowedSum,
    largest_threshold,
    sample_magnitudes,
    select_above,
    top_k,
)
from lowbit_strategy.methods._base.positions import num_kept
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.sparse_residuals import Condition, form_, pending_sums, undo_

MAX_BLOCKS = 1024
BLOCK_MULTIPLE = 32
_SAMPLE_KEPT = 256  # elements of all samples above the threshold: the count is then accurate to 6 %
_MOST = 4  # at most this many times the wanted count is sent: a spike must not fill the network


class Grid(NamedTuple):
    """Blocks of a flattened model; the last one also holds the tail."""

    numel: int
    block_numel: int
    num_blocks: int

    def bounds(self, sizes: Sequence[int]) -> list[int]:
        """First element of each partition, and the end; `sizes` are in blocks."""
        *starts, _ = accumulate(sizes, initial=0)
        return [*(block * self.block_numel for block in starts), self.numel]


def make_grid(numel: int) -> Grid:
    """1024 blocks of a multiple of 32 elements; fewer for a model with fewer than 32,768 elements."""
    block_numel = max(BLOCK_MULTIPLE, numel // MAX_BLOCKS // BLOCK_MULTIPLE * BLOCK_MULTIPLE)
    return Grid(numel, block_numel, min(MAX_BLOCKS, max(1, numel // block_numel)))


class UnionSelection(NamedTuple):
    """The elements that all ranks chose.

    Args:
        indices: The positions that each view sends: ascending, flat, int64.
        counts: Elements chosen in each partition.
        finite: Whether all ranks' gradients were finite.
    """

    indices: list[Tensor]
    counts: list[int]
    finite: bool


class FlatModel:
    """The views of one step as one flat model. Sums are formed when they are first read.

    Attributes:
        found: Conditions of the gradients; an overflow may be found only when a sum is formed.
    """

    def __init__(self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext) -> None:
        self.views, self.state, self.comm, self.step = views, state, comm, step
        self.found, self._totals = pending_sums(views, state)
        self.residuals = [state[view.spec.name]["residual"] for view in views]
        *self.starts, numel = accumulate((view.spec.numel for view in views), initial=0)
        self.grid = make_grid(numel)
        self.device = views[0].x.device

    def bounds(self, sizes: Sequence[int]) -> list[int]:
        """Edges of W partitions. With more ranks than blocks the last partitions are empty."""
        bounds = self.grid.bounds(sizes)
        return bounds + [self.grid.numel] * (self.comm.world_size + 1 - len(bounds))

    def _own(self, bounds: Sequence[int]) -> tuple[int, int]:
        partition = (self.step.index + self.comm.rank) % self.comm.world_size
        return bounds[partition], bounds[partition + 1]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """The pieces in [start, stop): index of the view, offset from `start`, and the view's elements."""
        for i, (view, first) in enumerate(zip(self.views, self.starts, strict=True)):
            if piece := range(max(start - first, 0), min(stop - first, view.spec.numel)):
                yield i, max(start, first) - start, piece

    def estimate(self, density: float, bounds: Sequence[int]) -> Generator[Pending, None, float]:
        """A threshold estimated from a sample of each rank's candidates; tails are gathered."""
        form_(self.views, self.state, self.found, self._totals)
        num = min(self.grid.numel, math.ceil(_SAMPLE_KEPT / density))
        tail = num_kept(density, num)
        sample = torch.cat(
            [torch.empty(0, dtype=torch.float32, device=self.device)]
            + [
                sample_magnitudes(
                    self.residuals[i][piece.start : piece.stop],
                    math.ceil(num * len(piece) / self.grid.numel),
                    seed=self.step.seed ^ zlib.crc32(self.views[i].spec.name.encode()),
                )
                for i, _, piece in self._pieces(*self._own(bounds))
            ]
        )
        largest = top_k(sample, min(tail, sample.numel()))[1]
        message = torch.zeros(tail + 1, dtype=torch.float32, device=self.device)
        message[0] = sample.numel()
        message[1 : 1 + largest.numel()] = largest
        tails = torch.empty(self.comm.world_size, tail + 1, dtype=torch.float32, device=self.device)
        yield self.comm.all_gather(tails, message)
        kept = num_kept(density, int(tails[:, 0].sum()))
        threshold = largest_threshold(tails[:, 1:].reshape(-1), kept)
        return max(threshold, TINY)  # zeros are never chosen

    def select(self, threshold: float, bounds: Sequence[int], wanted: int) -> Generator[Pending, None, UnionSelection]:
        """Choose in this rank's partition and tell all ranks; together they choose at most four times `wanted`.

        Raises:
            RuntimeError: A rank sent a table or a position that does not fit its partition.
        """
        comm, world_size, shift = self.comm, self.comm.world_size, self.step.index
        most = _MOST * wanted * (comm.rank + 1) // world_size - _MOST * wanted * comm.rank // world_size
        positions = self._above(threshold, *self._own(bounds), most)
        form_(self.views, self.state, self.found, self._totals)  # the values of the views outside of the own partition
        if world_size == 1:
            return UnionSelection(self._split(positions), [positions.numel()], Condition.NONFINITE not in self.found)
        longest = max(1, *(stop - start for start, stop in pairwise(bounds)))
        layout = sparse_layout(("",), (longest,), 1, self.device)
        located = layout.locate([positions])
        if Condition.NONFINITE in self.found:
            located.counts_DK.bitwise_not_()  # negative counts announce it
        counts_WK = torch.empty(world_size, layout.num_blocks, dtype=torch.int32, device=self.device)
        yield comm.all_gather(counts_WK, located.counts_DK[0])
        finite = min(counts_WK[:, 0].tolist()) >= 0
        if not finite:
            counts_WK = torch.maximum(counts_WK, ~counts_WK)
        sizes_W = [sizes[0] for sizes in layout.sizes(counts_WK)]
        splits = [POSITION_NBYTES * size for size in sizes_W]
        received = torch.empty(sum(splits), dtype=torch.uint8, device=self.device)
        wires_WB = located.positions.expand(world_size, -1)
        yield comm.all_to_all_uneven(received, wires_WB.reshape(-1), splits, [wires_WB.shape[1]] * world_size)
        wires = received.split_with_sizes(splits)
        ranks = [(partition - shift) % world_size for partition in range(world_size)]
        chosen = [layout.positions(counts_WK[r], [sizes_W[r]], wires[r])[0] for r in ranks]
        for (start, stop), part in zip(pairwise(bounds), chosen, strict=True):
            if layout.spans[0] > stop - start and part.numel() and int(part.max()) >= stop - start:
                raise damaged_message("a position lies beyond the end of its partition")
            part += start
        return UnionSelection(self._split(joined(chosen)), [sizes_W[r] for r in ranks], finite)

    def _above(self, threshold: float, start: int, stop: int, most: int) -> Tensor:
        """Positions, relative to `start`, of at most `most` live elements in [start, stop) that reach the threshold."""
        reached: list[tuple[Tensor, Tensor]] = []
        for i, at, piece in self._pieces(start, stop):
            if self.found[i] is not Condition.LIVE:
                continue
            share = len(piece) * most // (_MOST * max(stop - start, 1))
            try:
                if len(piece) == self.views[i].spec.numel:
                    found = self._totals[i].above(threshold, expected=share)
                else:
                    self._totals[i].formed()
                    found = select_above(self.residuals[i][piece.start : piece.stop], threshold, expected=share)
            except OverflowedSum:
                undo_(self.residuals[i], self.views[i].flat())
                self.found[i] = Condition.NONFINITE
                continue
            reached.append((found[0].long().add_(at) if at else found[0].long(), found[1]))
        if not reached:
            return torch.empty(0, dtype=torch.int64, device=self.device)
        indices = joined([indices for indices, _ in reached])
        if indices.numel() <= most:
            return indices
        return indices.index_select(0, top_k(joined([values for _, values in reached]), most)[0])

    def _split(self, positions: Tensor) -> list[Tensor]:
        """Convert ascending positions in the model to ascending positions in each view."""
        if len(self.starts) == 1:
            return [positions]
        edges = torch.tensor([*self.starts, self.grid.numel], device=self.device)
        at = torch.searchsorted(positions, edges).tolist()
        return [positions[at[i] : at[i + 1]] - start for i, start in enumerate(self.starts)]

    def block_counts(self, selection: UnionSelection) -> Tensor:
        """Number of chosen elements in each block; the tail counts for the last block."""
        parts = [indices + start for indices, start in zip(selection.indices, self.starts, strict=True)]
        block = (torch.cat(parts) // self.grid.block_numel).clamp_(max=self.grid.num_blocks - 1)
        return torch.bincount(block, minlength=self.grid.num_blocks)
