"""What methods share in which all ranks send the same positions: values are summed without saying where they belong."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.sparse import sum_values, sum_values_nbytes
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.collectives.stateful_codec import State
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_reducer import (
    Condition,
    accumulate_,
    layout_of,
    num_kept,
    observe_,
    write_sums_,
    zero_residuals,
)


class CommonPositionsReducer(Reducer):
    """Error feedback around positions that all ranks agree on.

    A rank whose gradient is idle sends zeros and keeps its residual; one whose gradient is not finite sends NaN.
    Subclasses are frozen dataclasses with the field ``density``.
    """

    density: float

    @property
    def residual_gain(self) -> float | None:
        return 1.0

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return zero_residuals(specs, device)

    def num_kept(self, spec: TensorSpec) -> int:
        return num_kept(self.density, spec.numel)

    def accumulate_(self, views: Sequence[View], state: ReducerState) -> list[Condition]:
        return accumulate_(views, state)

    @abstractmethod
    def positions(
        self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        """Of each view, ascending, int64, the same on all ranks; may communicate."""

    def take_(self, view: View, tensors: State, indices: Tensor) -> Tensor:
        """Values at the positions, taken out of the residual."""
        values = tensors["residual"].index_select(0, indices)
        tensors["residual"].index_fill_(0, indices, 0.0)
        return values

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        if not views:
            return
        found = self.accumulate_(views, state)
        indices = yield from self.positions(views, state, comm, step)
        values = []
        for view, condition, index in zip(views, found, indices, strict=True):
            tensors = state.get(view.spec.name, {})
            before = tensors["residual"].clone() if view.compensated is not None and "residual" in tensors else None
            if condition is Condition.LIVE:
                value = self.take_(view, tensors, index)
            else:
                filler = math.nan if condition is Condition.NONFINITE else 0.0
                value = torch.full((index.numel(),), filler, device=index.device)
            base = before if before is not None else torch.zeros(view.spec.numel, device=index.device)
            observe_(view, base, condition, Chosen(index, value), value)
            values.append(value)
        layout = layout_of(views, comm)
        total = yield from sum_values(values, indices, layout, comm)
        write_sums_(views, total, layout, comm.world_size)

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        return sum_values_nbytes(self.num_kept(spec), world_size, scatter=scatter)
