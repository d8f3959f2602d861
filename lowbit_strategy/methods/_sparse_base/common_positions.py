"""What methods share in which all ranks send the same positions: neither positions nor counts travel with values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.sparse.layout import Chosen
from lowbit_strategy.collectives.sparse.values import ValueSum, value_sum_nbytes
from lowbit_strategy.collectives.stateful_codec import StateTensors
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.methods._base.reducer import ReducerState, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_reducer import (
    Condition,
    ResidualReducer,
    accumulate_,
    num_kept,
    observe_,
    take_out_,
    write_sums_,
)


class PositionSumReducer(ResidualReducer):
    """Error feedback around a sum at positions that all ranks know.

    A rank whose gradient is idle sends zeros and keeps its residual; one whose gradient is not finite sends NaN.
    Subclasses are frozen dataclasses with the fields ``density`` and ``codec``.
    """

    density: float
    codec: Codec

    def num_kept(self, spec: TensorSpec) -> int:
        return num_kept(self.density, spec.numel)

    def accumulate_(self, views: Sequence[View], state: ReducerState) -> list[Condition]:
        return accumulate_(views, state)

    def values(self, view: View, tensors: StateTensors, indices: Tensor) -> Tensor:
        """What a live gradient's rank has to send at the positions, float32."""
        return tensors["residual"].index_select(0, indices)

    def keep_(self, view: View, tensors: StateTensors, chosen: Chosen, sent: Tensor) -> None:
        """Leave in the residual what was not sent."""
        take_out_(tensors["residual"], chosen, sent)

    def sum_at(
        self,
        indices: Sequence[Tensor],
        views: Sequence[View],
        found: Sequence[Condition],
        state: ReducerState,
        comm: Comm,
        step: StepContext,
    ) -> Iterator[Pending]:
        """Send the values at the positions, take them out of the residuals, write the means."""
        chosen = [self._chosen(*part, state) for part in zip(views, found, indices, strict=True)]
        exchange = ValueSum(
            [view.spec.name for view in views],
            [part.values for part in chosen],
            indices,
            [view.cut for view in views],
            self.codec,
            comm,
            scatter=views[0].scatter,
            seed=step.seed,
        )
        for view, condition, part, sent in zip(views, found, chosen, exchange.sent, strict=True):
            tensors = state.get(view.spec.name, {})
            observe_(view, tensors.get("residual"), condition, part, sent)
            if condition is Condition.LIVE:
                self.keep_(view, tensors, part, sent)
        sums = yield from exchange.run()
        if sums.lost is not None:
            for view, lost in zip(views, sums.lost, strict=True):
                if "residual" in (tensors := state.get(view.spec.name, {})):
                    tensors["residual"].index_add_(0, lost.indices, lost.values, alpha=self.residual_gain or 1.0)
        write_sums_(views, [sums.totals], comm.world_size)

    def _chosen(self, view: View, condition: Condition, indices: Tensor, state: ReducerState) -> Chosen:
        if condition is Condition.LIVE:
            return Chosen(indices, self.values(view, state.get(view.spec.name, {}), indices))
        filler = math.nan if condition is Condition.NONFINITE else 0.0
        return Chosen(indices, torch.full((indices.numel(),), filler, dtype=torch.float32, device=indices.device))

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool) -> int:
        return 1 if scatter else 2

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        return value_sum_nbytes(self.num_kept(spec), self.codec, world_size, scatter=scatter)


class CommonPositionsReducer(PositionSumReducer):
    """Positions that ranks agree on parameter by parameter."""

    @abstractmethod
    def positions(
        self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        """The positions of each view: ascending, int64, the same on all ranks; may communicate."""

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        if not views:
            return
        found = self.accumulate_(views, state)
        indices = yield from self.positions(views, state, comm, step)
        yield from self.sum_at(indices, views, found, state, comm, step)


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeReducer(PositionSumReducer):
    """All of each parameter, in float32: for the parameters that a sparse method sends whole."""

    density: float = 1.0
    codec: Codec = DenseCodec("float32")  # noqa: RUF009 (frozen)

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        if views:
            yield from self.sum_all(views, self.accumulate_(views, state), state, comm, step)

    def sum_all(
        self, views: Sequence[View], found: Sequence[Condition], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        """Send what has been accumulated."""
        indices = [torch.arange(view.spec.numel, device=view.x.device) for view in views]
        yield from self.sum_at(indices, views, found, state, comm, step)
