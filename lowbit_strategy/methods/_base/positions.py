"""Base classes of sparse methods, for the two ways to choose positions.

1. `OwnPositions`: each rank chooses its own positions, which travel with the values
2. `CommonPositions`: all ranks send the same positions, so that only values travel

A residual may have one byte per parameter. It grows until its element is sent, so a step's increment is far smaller
than the residual, and rounding to nearest would lose it. Stochastic rounding keeps it on average.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StateTensors, StepContext
from lowbit_strategy.codecs.sparse_values import Values, value_codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen, layout_of
from lowbit_strategy.collectives.sparse_sums import entries_sum_nbytes, exchange_entries, sum_values, value_sum_nbytes
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM, stream_key
from lowbit_strategy.kernels.select import OverflowedSum, Sum
from lowbit_strategy.kernels.sparse import take_out_, write_sum_
from lowbit_strategy.methods._base.compressor import Compressor, ReducingCompressor
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.residuals import ResidualDtype, read_residual, write_residual_, zero_residuals
from lowbit_strategy.methods._base.sparse_residuals import (
    Condition,
    accumulate_,
    filler,
    pending_sums,
    trace,
    undo_,
)
from lowbit_strategy.options.configuration import configuration


def check_density(density: float, field: str = "density") -> None:
    """Raise a ValueError if the density is not in (0, 1]."""
    if not 0.0 < density <= 1.0:
        raise ValueError(f"{field} must be in (0, 1] (0.01 keeps one element in a hundred), got {density!r}")


def num_kept(density: float, numel: int) -> int:
    """Number of elements to send out of `numel`: at least one, if there are any."""
    return min(numel, max(1, round(density * numel)))


@configuration
class SparseCompressor(ReducingCompressor):
    """Sends some of each parameter's elements.

    Args:
        density: Fraction of the elements that is sent, in (0, 1]. Smaller: fewer bytes, staler elements.
        residual: ``float32``: 4 bytes per parameter on every rank; ``int8``: 1, with a scale per 128 elements, rounded
            stochastically: noise, but no bias.
    """

    is_sparse: ClassVar[bool] = True
    title: ClassVar[str]
    own_temporary_nbytes: ClassVar[float] = 0.0  # in addition to an int8 residual's

    density: float = 0.01
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_density(self.density)

    @property
    def label(self) -> str:
        return f"{self.title} {self.density:g}"

    @property
    def residual_gain(self) -> float | None:
        return 1.0

    def num_kept(self, spec: TensorSpec) -> int:
        """Number of entries to send for a parameter."""
        return num_kept(self.density, spec.numel)

    def description(self, spec: TensorSpec) -> str:
        return self.label if self.residual == "float32" else f"{self.label}, {self.residual} residual"

    @property
    def temporary_nbytes(self) -> float:
        return self.own_temporary_nbytes + (0.0 if self.residual == "float32" else 1.5)

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return zero_residuals(specs, device, self.residual)

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        """Reduce with a float32 residual, which is rounded stochastically afterwards."""
        if not views:
            return
        if self.whole_model:
            order = {name: i for i, name in enumerate(state)}  # the model's order
            views = sorted(views, key=lambda view: order[view.spec.name])
        opened: ReducerState = dict(state)
        if self.residual == "int8":
            for view in views:
                name = view.spec.name
                if (values := read_residual(state.get(name, {}))) is not None:
                    opened[name] = {**state[name], "residual": values[: view.spec.numel]}
        yield from self.reduce_float32(views, opened, comm, step)
        for name, tensors in opened.items():
            if tensors is state[name]:
                continue
            residual, before = tensors["residual"], read_residual(state[name])
            assert before is not None
            if not torch.equal(residual, before[: residual.numel()]):  # an unchanged residual is not rounded again
                key = stream_key(step.seed, zlib.crc32(name.encode()), RESIDUAL_STREAM)
                write_residual_(state[name], residual, key=key)

    @abstractmethod
    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        """`reduce` with float32 residuals, for one or more parameters; those of a whole model come in its order."""


@configuration
class OwnPositions(SparseCompressor):
    """Base class of methods in which each rank chooses its own positions, parameter by parameter.

    Args:
        values: How values travel: ``float32``, ``bfloat16``, ``int8`` to ``int2`` (blocks with a scale) or any codec.
            Rounding errors stay in the residual. A position costs 2 more bytes.
    """

    same_counts: ClassVar[bool] = False  # whether every rank always sends `num_kept` entries

    values: Values | Codec = "float32"

    @property
    def codec(self) -> Codec:
        """Encodes the values."""
        return value_codec(self.values)

    def accumulate_(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm
    ) -> tuple[list[Condition], list[Sum]]:
        """Return the conditions, and the sums to choose from. An overflow may be found only when a sum is formed."""
        return pending_sums(views, state)

    @abstractmethod
    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        """Choose the entries of `total` to send, in ascending order. This must form the sum, in
        ``tensors["residual"]``.

        Raises:
            OverflowedSum: The sum overflows.
        """

    def taken_out_(self, tensors: StateTensors, chosen: Chosen) -> None:
        """Called once entries have been sent."""

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        return self.send(views, *self.accumulate_(views, state, comm), state, comm, step)

    def send(
        self,
        views: Sequence[ParamView],
        found: Sequence[Condition],
        totals: Sequence[Sum],
        state: ReducerState,
        comm: Comm,
        step: StepContext,
    ) -> Iterator[Pending]:
        """Choose entries, exchange them, and write the means."""
        entries = [
            self._choose(view, total, state[view.spec.name], condition, step)
            for view, total, condition in zip(views, totals, found, strict=True)
        ]
        layout, codec = layout_of(views, comm.world_size if views[0].spec.sharded else None), self.codec
        message = layout.pack([part for _, part in entries], codec, seed=step.seed)
        for view, (condition, part), sent in zip(views, entries, message.sent, strict=True):
            tensors = state[view.spec.name]
            trace(view, tensors["residual"], condition, part, sent.values)
            if condition is Condition.LIVE:
                take_out_(tensors["residual"], *part, sent.values)
                self.taken_out_(tensors, part)
        parts_SV = yield from exchange_entries(message, layout, codec, comm, same_counts=self.same_counts)
        write_sums_(views, parts_SV, comm.world_size)

    def _choose(
        self, view: ParamView, total: Sum, tensors: StateTensors, condition: Condition, step: StepContext
    ) -> tuple[Condition, Chosen]:
        """Return the entries to send, and the condition, which an overflow may change."""
        if condition is Condition.LIVE:
            try:
                return condition, self.choose(view, total, tensors, step)
            except OverflowedSum:
                undo_(tensors["residual"], view.flat())
                condition = Condition.NONFINITE
        count = self.num_kept(view.spec) if self.same_counts else int(condition is Condition.NONFINITE)
        return condition, filler(count, condition, tensors["residual"].device)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 1 if self.same_counts and not specs[0].sharded else 2  # counts, entries

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return entries_sum_nbytes(spec.numel, self.num_kept(spec), self.codec, world_size, sharded=spec.sharded)


@configuration
class CommonPositions(SparseCompressor):
    """Error feedback around a sum at positions that all ranks know.

    A rank with an idle gradient sends zeros and keeps its residual; one whose gradient is not finite sends NaN.
    """

    position_messages: ClassVar[int] = 0  # consecutive messages that agree on positions

    def accumulate_(self, views: Sequence[ParamView], state: ReducerState) -> list[Condition]:
        return accumulate_(views, state)

    def positions(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        """The positions of each view: ascending, int64, the same on all ranks; by default all. This may communicate."""
        return [torch.arange(view.spec.numel, device=view.x.device) for view in views]
        yield  # makes this a generator, without anything to wait for

    def values_at(self, view: ParamView, tensors: StateTensors, indices: Tensor) -> Tensor:
        """The float32 values that this rank sends at the positions."""
        return tensors["residual"].index_select(0, indices)

    def update_residual_(self, view: ParamView, tensors: StateTensors, sent: Chosen) -> None:
        """Take what was sent out of the residual."""
        tensors["residual"].index_fill_(0, sent.indices, 0.0)

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        views = [view for view in views if view.spec.numel]
        if not views:
            return
        found = self.accumulate_(views, state)
        indices = yield from self.positions(views, state, comm, step)
        yield from self.sum_at(indices, views, found, state, comm)

    def sum_at(
        self,
        indices: Sequence[Tensor],
        views: Sequence[ParamView],
        found: Sequence[Condition],
        state: ReducerState,
        comm: Comm,
    ) -> Iterator[Pending]:
        """Send the values there, take them out of the residuals, and write the means."""
        chosen = [self._chosen(*part, state) for part in zip(views, found, indices, strict=True)]
        for view, condition, part in zip(views, found, chosen, strict=True):
            tensors = state.get(view.spec.name, {})
            trace(view, tensors.get("residual"), condition, part, part.values)
            if condition is Condition.LIVE:
                self.update_residual_(view, tensors, part)
        rows = [view.row_numel for view in views] if views[0].spec.sharded else None
        write_sums_(views, [(yield from sum_values(chosen, rows, comm))], comm.world_size)

    def _chosen(self, view: ParamView, condition: Condition, indices: Tensor, state: ReducerState) -> Chosen:
        if condition is Condition.LIVE:
            return Chosen(indices, self.values_at(view, state.get(view.spec.name, {}), indices))
        return Chosen(indices, filler(indices.numel(), condition, indices.device).values)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return self.position_messages + (1 if specs[0].sharded else 2)

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        """Bytes that one rank sends to agree on a parameter's positions."""
        return 0

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        values = value_sum_nbytes(self.num_kept(spec), world_size, sharded=spec.sharded)
        return self.positions_nbytes(spec, world_size) + values


def write_sums_(views: Sequence[ParamView], parts_SV: Sequence[Sequence[Chosen]], world_size: int) -> None:
    """Add up what each source sent, and write each view's result: the mean, or its row's sum.

    Args:
        views: The parameters.
        parts_SV: Entries of each parameter, for each source in order.
        world_size: Number of ranks in the mean.
    """
    for v, view in enumerate(views):
        write_sum_(view.out, [parts[v] for parts in parts_SV], 1.0 if view.spec.sharded else 1.0 / world_size)
