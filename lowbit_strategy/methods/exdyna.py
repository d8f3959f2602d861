"""ExDyna: exclusive partitions that move with the load, and a threshold that follows the count."""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import POSITION_NBYTES, damaged_message, joined, sparse_layout
from lowbit_strategy.kernels.select import (
    TINY,
    OverflowedSum,
    largest_threshold,
    sample_magnitudes,
    select_above,
    top_k,
)
from lowbit_strategy.methods._base.positions import CommonPositions
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.sparse_residuals import (
    Condition,
    form_,
    num_kept,
    pending_sums,
    undo_,
)
from lowbit_strategy.options.configuration import configuration

MAX_BLOCKS = 1024
BLOCK_MULTIPLE = 32
_UNBALANCED = 0.1  # loads further than this above the mean, apart from noise: partitions are cut again


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
    """1024 blocks of a multiple of 32 elements; fewer for a model of less than 32,768."""
    block_numel = max(BLOCK_MULTIPLE, numel // MAX_BLOCKS // BLOCK_MULTIPLE * BLOCK_MULTIPLE)
    return Grid(numel, block_numel, min(MAX_BLOCKS, max(1, numel // block_numel)))


def equal_sizes(num_blocks: int, world_size: int) -> list[int]:
    """Blocks per partition at the start; at most one partition per block."""
    count = min(num_blocks, world_size)
    return [num_blocks * (p + 1) // count - num_blocks * p // count for p in range(count)]


def balanced(sizes: Sequence[int], loads: Sequence[float], minimum: int) -> list[int]:
    """Move one block from each partition with too many chosen elements to a neighbor with too few."""
    sizes, mean = list(sizes), sum(loads) / len(loads)
    if mean == 0:
        return sizes
    for i in range(len(sizes) - 1):
        here, uplink = loads[i] / mean, loads[i + 1] / mean
        if here > 1.05 and uplink < 0.952 and sizes[i] > minimum:
            sizes[i], sizes[i + 1] = sizes[i] - 1, sizes[i + 1] + 1
        elif uplink > 1.05 and here < 0.952 and sizes[i + 1] > minimum:
            sizes[i], sizes[i + 1] = sizes[i] + 1, sizes[i + 1] - 1
    return sizes


def repartitioned(block_loads: Sequence[float], num_partitions: int) -> list[int]:
    """Blocks per partition, at least one, so that all have about the same number of chosen elements."""
    num_blocks, total = len(block_loads), sum(block_loads)
    sizes, at, seen = [], 0, 0.0
    for p in range(1, num_partitions):
        first, latest = at, num_blocks - (num_partitions - p)
        target = total * p / num_partitions
        while at < latest and (at == first or seen + block_loads[at] / 2 <= target):
            seen += block_loads[at]
            at += 1
        sizes.append(at - first)
    return [*sizes, num_blocks - at]


def is_unbalanced(loads: Sequence[float]) -> bool:
    mean = sum(loads) / len(loads)
    return max(loads) > (1 + _UNBALANCED) * mean + 2 * math.sqrt(mean)


_SAMPLE_KEPT = 256  # elements of all samples above the threshold: the count is then off by 6 %
_MOST = 4  # times the wanted count are sent at most: a spike must not fill the network


class UnionSelection(NamedTuple):
    """What all ranks chose.

    Args:
        indices: What each view sends: ascending flat positions, int64.
        counts: Elements chosen in each partition.
        finite: Whether all ranks' gradients were.
    """

    indices: list[Tensor]
    counts: list[int]
    finite: bool


class FlatModel:
    """The views of one step as one flat model, whose sums are formed when they are first read.

    Attributes:
        found: Conditions of the gradients; an overflow may show only when a sum is formed.
    """

    def __init__(self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext) -> None:
        self.views, self.state, self.comm, self.step = views, state, comm, step
        self.found, self._totals = pending_sums(views, state)
        self.residuals = [state[view.spec.name]["residual"] for view in views]
        *self.starts, numel = accumulate((view.spec.numel for view in views), initial=0)
        self.grid = make_grid(numel)
        self.device = views[0].x.device

    def bounds(self, sizes: Sequence[int]) -> list[int]:
        """Edges of W partitions; with more ranks than blocks the last ones are empty."""
        bounds = self.grid.bounds(sizes)
        return bounds + [self.grid.numel] * (self.comm.world_size + 1 - len(bounds))

    def _own(self, bounds: Sequence[int]) -> tuple[int, int]:
        partition = (self.step.index + self.comm.rank) % self.comm.world_size
        return bounds[partition], bounds[partition + 1]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """What lies in [start, stop): index of the view, offset from `start`, and the view's elements."""
        for i, (view, first) in enumerate(zip(self.views, self.starts, strict=True)):
            if piece := range(max(start - first, 0), min(stop - first, view.spec.numel)):
                yield i, max(start, first) - start, piece

    def estimate(self, density: float, bounds: Sequence[int]) -> Generator[Pending, None, float]:
        """A threshold from samples of what each rank is about to choose from: their tails are gathered."""
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
        """Choose in the own partition; tell all ranks. Together they choose at most four times `wanted`.

        Raises:
            RuntimeError: A rank has sent a table or a position that does not fit its partition.
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
            located.counts_DK.bitwise_not_()  # negative ones announce it
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
        """Positions, from `start`, of live elements in [start, stop) from the threshold on; at most `most`."""
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
        """Ascending positions in the model as ascending positions in each view."""
        if len(self.starts) == 1:
            return [positions]
        edges = torch.tensor([*self.starts, self.grid.numel], device=self.device)
        at = torch.searchsorted(positions, edges).tolist()
        return [positions[at[i] : at[i + 1]] - start for i, start in enumerate(self.starts)]

    def block_counts(self, selection: UnionSelection) -> Tensor:
        """Chosen elements of each block; the tail counts for the last."""
        parts = [indices + start for indices, start in zip(selection.indices, self.starts, strict=True)]
        block = (torch.cat(parts) // self.grid.block_numel).clamp_(max=self.grid.num_blocks - 1)
        return torch.bincount(block, minlength=self.grid.num_blocks)


_BAND = 1.1  # counts off the target by more than this factor: the threshold is estimated again
_CALM = 0.03  # largest change of an estimate, in its logarithm, that the online rule can follow
_PROPORTIONAL, _INTEGRAL = 0.02, 0.003  # residuals pile up: a percent more threshold can halve the count
_MEMORY = 0.7  # weight of older counts in loads: one step's counts are noisy


def _store_sizes_(control: StateTensors, sizes: Sequence[int]) -> None:
    control["sizes"].zero_()[: len(sizes)] = torch.tensor(sizes, dtype=torch.int16)


@configuration
class ExDyna(CommonPositions):
    """Sparsification without sorting, in which ranks never choose the same position.

    The accumulated gradient ``h = g + e`` of the whole model (under FSDP2: of each module) is cut into 1024 blocks of
    a multiple of 32 elements, contiguous blocks form W partitions. In step t, on every rank r:

    1. ``h = g + e``
    2. the threshold t follows the last step's count, ``r`` times the wanted one:
       ``drift += 0.003 ln r; ln t += 0.02 ln r + drift``
    3. ``|h| >= t`` in partition ``(step + rank) mod W`` only
    4. all ranks get all positions, and each contributes its own ``h`` there; ``e' = h``, 0 there
    5. between neighboring partitions, one with more than 1.05 and one with less than 0.952 times the mean load, a
       block changes sides; no partition falls below a quarter of an equal share

    The authors' rules take hundreds of steps to settle. Theirs moves the threshold by 0.5 % per step from a start of
    ``1 / (2 * sqrt(k))``; here it is estimated from a sample of what the ranks are about to choose from: at the start,
    while estimates move by more than 3 % per step, and when the count is further than a factor of 1.1 from the target.
    Theirs moves partitions by one block per step; here they are cut again when a load is more than a tenth above the
    mean. Loads are moving averages of counts. No more than four times the wanted number is sent.

    Args:
        density: Share of the model's elements that is sent, in (0, 1].

    References:
        Yoon & Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
        2024, arXiv 2402.13781.
    """

    name: ClassVar[str] = "exdyna"
    whole_model: ClassVar[bool] = True
    position_messages: ClassVar[int] = 2  # an estimate of the threshold costs one more
    balances: ClassVar[bool] = True  # partitions, by their loads

    @property
    def label(self) -> str:
        return f"{self.name} {self.density:g}"

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """The controls of a model (under FSDP2: of a module) are kept with its first parameter.

        ``threshold``; ``drift``: logarithm of its growth per step; ``calm``: whether the last estimate hardly moved;
        ``ratio``: chosen over wanted in the last step; ``loads``: moving average of the chosen elements per block;
        ``sizes``: blocks per partition.
        """
        state = CommonPositions.init(self, specs, device)
        for tensors in state.values():
            for key in ("threshold", "drift", "calm", "ratio"):
                tensors[key] = torch.zeros(1, dtype=torch.float32, device=device)
            tensors["loads"] = torch.zeros(MAX_BLOCKS, dtype=torch.float32, device=device)
            tensors["sizes"] = torch.zeros(MAX_BLOCKS, dtype=torch.int16, device=device)
        return state

    def rescale_residual_(self, tensors: StateTensors, factor: float | Tensor) -> None:
        Reducer.rescale_residual_(self, tensors, factor)
        tensors["threshold"].mul_(factor)  # what it is compared with is mostly residual

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        model = FlatModel(views, state, comm, step)
        control = state[views[0].spec.name]
        sizes = self._sizes(model, control)
        bounds = model.bounds(sizes)
        threshold = yield from self._threshold(model, control, bounds)
        selection = yield from model.select(threshold, bounds, num_kept(self.density, model.grid.numel))
        yield from self.sum_at(selection.indices, views, model.found, state, comm, step)
        if not selection.finite:
            for view in views:
                view.out.fill_(math.nan)
        self._update_(model, control, selection, sizes)

    def _threshold(
        self, model: FlatModel, control: StateTensors, bounds: Sequence[int]
    ) -> Generator[Pending, None, float]:
        """Follow the last count and the trend, or estimate from a sample."""
        if self.density == 1.0:
            return 0.0
        before, ratio, drift, calm = (float(control[key]) for key in ("threshold", "ratio", "drift", "calm"))
        if calm and 1 / _BAND <= ratio <= _BAND:
            drift += _INTEGRAL * math.log(ratio)
            threshold = before * math.exp(_PROPORTIONAL * math.log(ratio) + drift)
        else:
            threshold = yield from model.estimate(self.density, bounds)
            moved = math.log(threshold / before) if before > 0 else math.inf
            drift = (drift + max(-_CALM, min(_CALM, moved))) / 2
            control["calm"].fill_(abs(moved) < _CALM)
        control["drift"].fill_(drift)
        control["threshold"].fill_(threshold)
        return float(control["threshold"])

    def _sizes(self, model: FlatModel, control: StateTensors) -> list[int]:
        """Blocks per partition; equal at the start, and when the number of ranks or blocks has changed."""
        equal = equal_sizes(model.grid.num_blocks, model.comm.world_size)
        if len(equal) == 1:
            return equal
        sizes = [size for size in control["sizes"][: len(equal) + 1].tolist() if size]
        if len(sizes) == len(equal) and sum(sizes) == model.grid.num_blocks:
            return sizes
        _store_sizes_(control, equal)
        return equal

    def _update_(
        self, model: FlatModel, control: StateTensors, selection: UnionSelection, sizes: Sequence[int]
    ) -> None:
        control["ratio"].fill_(sum(selection.counts) / num_kept(self.density, model.grid.numel))
        if not self.balances or len(sizes) == 1:
            return
        block_counts = model.block_counts(selection)
        block_loads_K = control["loads"][: block_counts.numel()].mul_(_MEMORY).add_(block_counts)
        loads = [float(part.sum()) for part in block_loads_K.split(list(sizes))]
        if is_unbalanced(loads):
            _store_sizes_(control, repartitioned(block_loads_K.tolist(), len(sizes)))
        else:
            _store_sizes_(control, balanced(sizes, loads, max(1, model.grid.num_blocks // (4 * len(sizes)))))

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return POSITION_NBYTES * -(-self.num_kept(spec) // world_size) * (world_size - 1)


@configuration
class MiCRO(ExDyna):
    """`ExDyna` with partitions of fixed size: simpler, but uneven where large gradients are close together.

    References:
        Yoon & Oh, "MiCRO: Near-Zero Cost Gradient Sparsification for Scaling and Accelerating Distributed DNN
        Training", 2023, arXiv 2310.00967. From the definition, not from the authors' code.
    """

    name: ClassVar[str] = "micro"
    balances: ClassVar[bool] = False
