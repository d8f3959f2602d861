"""Reducers around another one: what they leave to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerAround(Reducer):
    """Keeps residuals for `inner`, which sends."""

    inner: Reducer

    @property
    def whole_model(self) -> bool:  # type: ignore[override]
        return self.inner.whole_model

    def rescale_(self, state: ReducerState, factor: float) -> None:
        self.inner.rescale_(state, factor)  # the residuals too: by default whatever bears that name is rescaled

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool) -> int:
        return self.inner.num_messages(specs, world_size, scatter=scatter)

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        return self.inner.wire_nbytes(spec, world_size, scatter=scatter)
