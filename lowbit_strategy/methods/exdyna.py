"""ExDyna: exclusive partitions that follow the load, and a threshold that follows the count."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import POSITION_NBYTES
from lowbit_strategy.methods._base.flat_model import MAX_BLOCKS, FlatModel, UnionSelection
from lowbit_strategy.methods._base.positions import CommonPositions, num_kept
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.options.configuration import configuration

_BAND = 1.1  # the threshold is estimated again if counts are off by more than this factor
_CALM = 0.03  # largest change of an estimate, in its logarithm, that the online rule can follow
_PROPORTIONAL, _INTEGRAL = 0.02, 0.003  # residuals pile up: a threshold higher by a percent can halve the count
_MEMORY = 0.7  # weight of older counts in loads: one step's counts are noisy
_UNBALANCED = 0.1  # partitions are cut again if loads exceed the mean by more than this, apart from noise


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
        here, following = loads[i] / mean, loads[i + 1] / mean
        if here > 1.05 and following < 0.952 and sizes[i] > minimum:
            sizes[i], sizes[i + 1] = sizes[i] - 1, sizes[i + 1] + 1
        elif following > 1.05 and here < 0.952 and sizes[i + 1] > minimum:
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


def _store_sizes_(control: StateTensors, sizes: Sequence[int]) -> None:
    control["sizes"].zero_()[: len(sizes)] = torch.tensor(sizes, dtype=torch.int16)


@configuration
class ExDyna(CommonPositions):
    """Sparsification without sorting, in which ranks never choose the same position.

    The accumulated gradient ``h = g + e`` of the whole model (under FSDP2: of each module) is cut into 1024 blocks of a
    multiple of 32 elements; contiguous blocks form W partitions. On every rank:

    1. ``h = g + e``
    2. the threshold tau follows the last step's count, ``ratio`` times the wanted one:
       ``drift += 0.003 ln ratio; ln tau += 0.02 ln ratio + drift``
    3. ``|h| >= tau`` in partition ``(step + rank) mod W`` only
    4. all ranks get all positions, and each rank contributes its own ``h`` there; ``e' = h``, but 0 there
    5. if a partition has more than 1.05 times the mean load and its neighbor less than 0.952 times, a block moves over;
       no partition falls below a quarter of an equal share

    The authors' rules take hundreds of steps to settle. They move the threshold by 0.5 % per step from a start of ``1 /
    (2 * sqrt(k))``. Here it is estimated from a sample of the ranks' candidates: at the start, while estimates move by
    more than 3 % per step, and when the count is off the target by more than a factor of 1.1. They move partitions by
    one block per step; here partitions are cut again when a load is more than a tenth above the mean. Loads are moving
    averages of counts. At most four times the wanted number is sent.

    Args:
        density: Share of the model's elements that is sent, in (0, 1].

    References:
        Yoon & Oh, "Preserving Near-Optimal Gradient Sparsification Cost for Scalable Distributed Deep Learning",
        2024, arXiv 2402.13781.
    """

    name: ClassVar[str] = "exdyna"
    whole_model: ClassVar[bool] = True
    position_messages: ClassVar[int] = 2  # estimating the threshold costs one more
    balances: ClassVar[bool] = True  # partitions, by their loads

    @property
    def label(self) -> str:
        return f"{self.name} {self.density:g}"

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """The state of a model (under FSDP2: of a module) is kept with its first parameter.

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
        tensors["threshold"].mul_(factor)  # it is compared with values that are mostly residual

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        model = FlatModel(views, state, comm, step)
        control = state[views[0].spec.name]
        sizes = self._sizes(model, control)
        bounds = model.bounds(sizes)
        threshold = yield from self._threshold(model, control, bounds)
        selection = yield from model.select(threshold, bounds, num_kept(self.density, model.grid.numel))
        yield from self.sum_at(selection.indices, views, model.found, state, comm)
        if not selection.finite:
            for view in views:
                view.out.fill_(math.nan)
        self._update_(model, control, selection, sizes)

    def _threshold(
        self, model: FlatModel, control: StateTensors, bounds: Sequence[int]
    ) -> Generator[Pending, None, float]:
        """The next threshold: it follows the last count and the trend, or is estimated from a sample."""
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
        """Blocks per partition: equal at the start and when the number of ranks or blocks has changed."""
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
