"""Sparse methods in which all ranks send the same positions, so that only values travel."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.sparse.layout import Chosen
from lowbit_strategy.collectives.sparse.values import ValueSum, value_sum_nbytes
from lowbit_strategy.collectives.stateful_codec import StateTensors, StepContext
from lowbit_strategy.methods._base.reducer import ReducerState, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_reducer import (
    Condition,
    DensityReducer,
    accumulate_,
    filler,
    in_order,
    observe_,
    take_out_,
    write_sums_,
)


class CommonPositionsReducer(DensityReducer):
    """Error feedback around a sum at positions that all ranks know.

    A rank with an idle gradient sends zeros and keeps its residual; one whose gradient is not finite sends NaN.
    """

    position_messages: ClassVar[int] = 0  # in series, to agree on positions

    def accumulate_(self, views: Sequence[View], state: ReducerState) -> list[Condition]:
        return accumulate_(views, state)

    def positions(
        self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        """The positions of each view: ascending, int64, the same on all ranks; may communicate. By default all."""
        return [torch.arange(view.spec.numel, device=view.x.device) for view in views]
        yield  # a generator that has nothing to wait for

    def values(self, view: View, tensors: StateTensors, indices: Tensor) -> Tensor:
        """What this rank sends at the positions, float32."""
        return tensors["residual"].index_select(0, indices)

    def update_residual_(self, view: View, tensors: StateTensors, chosen: Chosen, sent: Tensor) -> None:
        """Take what was sent out of the residual."""
        take_out_(tensors["residual"], chosen, sent)

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        views = [view for view in views if view.spec.numel]
        if not views:
            return
        if self.whole_model:
            views = in_order(views, state)
        found = self.accumulate_(views, state)
        indices = yield from self.positions(views, state, comm, step)
        yield from self.sum_at(indices, views, found, state, comm, step)

    def sum_at(
        self,
        indices: Sequence[Tensor],
        views: Sequence[View],
        found: Sequence[Condition],
        state: ReducerState,
        comm: Comm,
        step: StepContext,
    ) -> Iterator[Pending]:
        """Send the values there, take them out of the residuals, write the means."""
        chosen = [self._chosen(*part, state) for part in zip(views, found, indices, strict=True)]
        names = [view.spec.name for view in views]
        cuts = [view.cut for view in views] if views[0].spec.sharded else None
        exchange = ValueSum(names, chosen, cuts, self.codec, comm, seed=step.seed)
        for view, condition, part, sent in zip(views, found, chosen, exchange.sent, strict=True):
            tensors = state.get(view.spec.name, {})
            observe_(view, tensors.get("residual"), condition, part, sent)
            if condition is Condition.LIVE:
                self.update_residual_(view, tensors, part, sent)
        totals, lost = yield from exchange.run()
        for view, part in zip(views, lost, strict=bool(lost)):
            if "residual" in (tensors := state.get(view.spec.name, {})):
                tensors["residual"].index_add_(0, part.indices, part.values, alpha=self.residual_gain or 1.0)
        write_sums_(views, [totals], comm.world_size)

    def _chosen(self, view: View, condition: Condition, indices: Tensor, state: ReducerState) -> Chosen:
        if condition is Condition.LIVE:
            return Chosen(indices, self.values(view, state.get(view.spec.name, {}), indices))
        return Chosen(indices, filler(indices.numel(), condition, indices.device).values)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return self.position_messages + (1 if specs[0].sharded else 2)

    def positions_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        """What one rank sends to others to agree on the positions of a parameter."""
        return 0

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        values = value_sum_nbytes(self.num_kept(spec), self.codec, world_size, scatter=spec.sharded)
        return self.positions_nbytes(spec, world_size) + values
