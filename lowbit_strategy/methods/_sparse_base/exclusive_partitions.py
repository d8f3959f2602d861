"""Selection by a common threshold in exclusive partitions: what ExDyna and MiCRO share.

The parameters of a model (under FSDP2: of a module), one after the other in the order of registration, are cut into W
partitions. In every step each rank chooses in one of them only, so that no position is chosen twice and the union of
what the ranks chose is as large as the sum. Then every rank contributes its own value at every chosen position.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.sparse_layout import (
    BLOCK_BITS,
    POSITION_NBYTES,
    damaged_message,
    impossible_table,
)
from lowbit_strategy.collectives.stateful_codec import StateTensors
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.select import largest_threshold, sample_magnitudes, select_above, top_k
from lowbit_strategy.methods._base.reducer import ReducerState, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.block_partitions import (
    MAX_BLOCKS,
    balanced,
    cut_anew,
    equal_sizes,
    is_lopsided,
    make_grid,
)
from lowbit_strategy.methods._sparse_base.common_positions import PositionSumReducer
from lowbit_strategy.methods._sparse_base.sparse_reducer import Condition, num_kept, zero_residuals

_SAMPLE_KEPT = 256  # of all ranks' samples above the threshold: the count is off by 6 % then
_BAND = 1.1  # counts further than this factor from the target: the threshold is estimated anew
_CALM = 0.03  # largest move of an estimate, in its logarithm, that the online rule can follow
_PROPORTIONAL, _INTEGRAL = 0.02, 0.003  # feedback sums up: a percent more threshold can halve the count
_TINY = torch.finfo(torch.float32).tiny
_MEMORY = 0.7  # weight of older counts in loads: one step's counts are noisy
_MOST = 4  # times the wanted count, whatever the gradient: a spike must not fill the network


class Selection(NamedTuple):
    """What all ranks chose.

    Args:
        indices: Of each view, ascending flat positions, int64.
        counts: Elements chosen in each partition.
        finite: Whether all ranks' gradients were.
    """

    indices: list[Tensor]
    counts: list[int]
    finite: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ExclusiveReducer(PositionSumReducer):
    """Fields as in `ExDyna`; ``codec`` of the values; ``adjust``: whether partitions are balanced by their loads."""

    density: float
    codec: Codec
    adjust: bool
    whole_model: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"{'exdyna' if self.adjust else 'micro'} {self.density:g}"

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """The controls of a model are kept with its first parameter: under FSDP2 every module is a model of its own.

        ``threshold``; ``drift``: logarithm of its growth in a step; ``calm``: whether the last estimate hardly moved;
        ``ratio``: chosen over wanted in the last step; ``loads``: chosen in each block, older steps weighing less;
        ``sizes``: blocks of each partition.
        """
        state = zero_residuals(specs, device)
        for tensors in state.values():
            for key in ("threshold", "drift", "calm", "ratio"):
                tensors[key] = torch.zeros(1, dtype=torch.float32, device=device)
            tensors["loads"] = torch.zeros(MAX_BLOCKS, dtype=torch.float32, device=device)
            tensors["sizes"] = torch.zeros(MAX_BLOCKS, dtype=torch.int16, device=device)
        return state

    def rescale_(self, state: ReducerState, factor: float) -> None:
        for tensors in state.values():
            tensors["residual"].mul_(factor)
            tensors["threshold"].mul_(factor)

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        if not views:
            return
        order = {name: i for i, name in enumerate(state)}  # buckets come in any order
        views = sorted(views, key=lambda view: order[view.spec.name])
        found = self.accumulate_(views, state)
        model = _Model(views, found, state, comm, step)
        control = state[views[0].spec.name]
        bounds = model.bounds(self._sizes(model, control))
        threshold = yield from self._threshold(model, control, bounds)
        selection = yield from model.select(threshold, bounds, num_kept(self.density, model.grid.numel))
        yield from self.sum_at(selection.indices, views, found, state, comm, step)
        if not selection.finite:
            for view in views:
                view.out.fill_(math.nan)
        self._learn_(model, control, selection)

    def _threshold(
        self, model: _Model, control: StateTensors, bounds: Sequence[int]
    ) -> Generator[Pending, None, float]:
        """Follow the last count and the trend; estimate where there is nothing to follow yet."""
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

    def _sizes(self, model: _Model, control: StateTensors) -> list[int]:
        """Blocks of each partition; equal shares at the start, and where the world or the model has another size."""
        equal = equal_sizes(model.grid.num_blocks, model.comm.world_size)
        sizes = [size for size in control["sizes"].tolist() if size]
        return sizes if len(sizes) == len(equal) and sum(sizes) == model.grid.num_blocks else equal

    def _learn_(self, model: _Model, control: StateTensors, selection: Selection) -> None:
        control["ratio"].fill_(sum(selection.counts) / num_kept(self.density, model.grid.numel))
        sizes = self._sizes(model, control)
        if self.adjust and len(sizes) > 1:
            block_counts = model.block_counts(selection)
            block_loads_K = control["loads"][: block_counts.numel()].mul_(_MEMORY).add_(block_counts)
            loads = [float(part.sum()) for part in block_loads_K.split(sizes)]
            if is_lopsided(loads):
                sizes = cut_anew(block_loads_K.tolist(), len(sizes))
            else:
                sizes = balanced(sizes, loads, max(1, model.grid.num_blocks // (4 * len(sizes))))
        control["sizes"].zero_()[: len(sizes)] = torch.tensor(sizes, dtype=torch.int16)

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        count = num_kept(self.density, spec.numel)
        positions = POSITION_NBYTES * -(-count // world_size) * (world_size - 1)
        return positions + PositionSumReducer.wire_nbytes(self, spec, world_size, scatter=scatter)


class _Model:
    """The views of one step as one flat model."""

    def __init__(
        self, views: Sequence[View], found: Sequence[Condition], state: ReducerState, comm: Comm, step: StepContext
    ) -> None:
        self.views, self.found, self.comm, self.step = views, found, comm, step
        self.residuals = [state[view.spec.name]["residual"] for view in views]
        self.starts, at = [], 0
        for view in views:
            self.starts.append(at)
            at += view.spec.numel
        self.grid = make_grid(at)
        self.device = views[0].x.device

    def bounds(self, sizes: Sequence[int]) -> list[int]:
        """Edges of W partitions; with more ranks than blocks the last ones are empty."""
        bounds = self.grid.bounds(sizes)
        return bounds + [self.grid.numel] * (self.comm.world_size + 1 - len(bounds))

    def _own(self, bounds: Sequence[int]) -> tuple[int, int]:
        partition = (self.step.index + self.comm.rank) % self.comm.world_size
        return bounds[partition], bounds[partition + 1]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Accumulated gradients in [start, stop): which view, where they begin, counted from `start`, and they."""
        first = max(bisect_right(self.starts, start) - 1, 0)
        for i in range(first, len(self.views)):
            if self.starts[i] >= stop:
                break
            piece = self.residuals[i][max(start - self.starts[i], 0) : stop - self.starts[i]]
            if piece.numel():
                yield i, max(start, self.starts[i]) - start, piece

    def estimate(self, density: float, bounds: Sequence[int]) -> Generator[Pending, None, float]:
        """A threshold from samples of what each rank is about to choose from: their tails are put together."""
        num = min(self.grid.numel, math.ceil(_SAMPLE_KEPT / density))
        tail = num_kept(density, num)
        sample = torch.cat(
            [torch.empty(0, dtype=torch.float32, device=self.device)]
            + [
                sample_magnitudes(
                    piece,
                    math.ceil(num * piece.numel() / self.grid.numel),
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
        return max(threshold, _TINY)  # nothing but zeros: from the smallest number on, so that zeros are not chosen

    def select(self, threshold: float, bounds: Sequence[int], wanted: int) -> Generator[Pending, None, Selection]:
        """Choose in the own partition; inform all ranks. Together they choose at most four times what is wanted.

        Raises:
            RuntimeError: A rank has sent a table or a position that does not fit its partition.
        """
        comm, world_size, shift = self.comm, self.comm.world_size, self.step.index
        most = _MOST * wanted * (comm.rank + 1) // world_size - _MOST * wanted * comm.rank // world_size
        positions = self._above(threshold, *self._own(bounds), most)
        num_blocks = max(-(-(stop - start) >> BLOCK_BITS) for start, stop in pairwise(bounds))
        table = torch.zeros(world_size, 1 + num_blocks, dtype=torch.int32, device=self.device)
        counts = torch.bincount(positions >> BLOCK_BITS, minlength=num_blocks)
        nonfinite = any(condition is Condition.NONFINITE for condition in self.found)
        yield comm.all_gather(table, torch.cat([counts.new_tensor([nonfinite]), counts]).to(torch.int32))
        counts_WK = table[:, 1:]
        partition_W = [(rank + shift) % world_size for rank in range(world_size)]
        edges_W2 = torch.tensor([bounds[p : p + 2] for p in partition_W], device=self.device)
        block_K = torch.arange(num_blocks, device=self.device) << BLOCK_BITS
        room_WK = (edges_W2.diff(dim=1) - block_K).clamp_(0, 1 << BLOCK_BITS)
        wrong_W = ((counts_WK < 0) | (counts_WK > room_WK)).sum(1)
        found_3W: list[list[int]] = torch.stack([table[:, 0], counts_WK.sum(1), wrong_W]).tolist()
        nonfinite_W, sizes_W, wrong = found_3W
        if any(wrong):
            raise impossible_table(wrong.index(max(wrong)), max(wrong), num_blocks)
        wire = (positions & 0xFFFF).to(torch.int16).view(torch.uint8)
        received = torch.empty(POSITION_NBYTES * sum(sizes_W), dtype=torch.uint8, device=self.device)
        splits = [POSITION_NBYTES * size for size in sizes_W]
        yield comm.all_to_all_uneven(received, wire.repeat(world_size), splits, [wire.numel()] * world_size)
        low_E = received.view(torch.int16).long() & 0xFFFF
        every_block = torch.arange(world_size * num_blocks, device=self.device)
        block_E = every_block.repeat_interleave(counts_WK.reshape(-1), output_size=sum(sizes_W))
        if bool((low_E >= room_WK.view(-1).index_select(0, block_E)).any()):
            raise damaged_message("a position lies beyond the end of its partition")
        start_E = (edges_W2[:, :1] + block_K).view(-1).index_select(0, block_E)
        chosen_W = (start_E + low_E).split(sizes_W)
        ranks = [(partition - shift) % world_size for partition in range(world_size)]
        chosen = self._split(torch.cat([chosen_W[rank] for rank in ranks]))
        return Selection(chosen, [sizes_W[rank] for rank in ranks], not any(nonfinite_W))

    def _above(self, threshold: float, start: int, stop: int, most: int) -> Tensor:
        """Positions, counted from `start`, of live elements in [start, stop) that reach the threshold; the largest of
        them if they are more than `most`.
        """
        indices = [torch.empty(0, dtype=torch.int64, device=self.device)]
        values = [torch.empty(0, dtype=torch.float32, device=self.device)]
        for i, at, piece in self._pieces(start, stop):
            if self.found[i] is Condition.LIVE:
                share = piece.numel() * most // (_MOST * max(stop - start, 1))
                found = select_above(piece, threshold, expected=share)
                indices.append(found[0].long() + at)
                values.append(found[1])
        reached = torch.cat(indices)
        if reached.numel() <= most:
            return reached
        return reached.index_select(0, top_k(torch.cat(values), most)[0])

    def _split(self, positions: Tensor) -> list[Tensor]:
        """Ascending positions in the model as ascending positions in each view."""
        edges = torch.tensor([*self.starts, self.grid.numel], device=self.device)
        at = torch.searchsorted(positions, edges).tolist()
        return [positions[at[i] : at[i + 1]] - start for i, start in enumerate(self.starts)]

    def block_counts(self, selection: Selection) -> Tensor:
        """Chosen elements of each block; the tail counts for the last."""
        parts = [indices + start for indices, start in zip(selection.indices, self.starts, strict=True)]
        block = (torch.cat(parts) // self.grid.block_numel).clamp_(max=self.grid.num_blocks - 1)
        return torch.bincount(block, minlength=self.grid.num_blocks)
