"""Base class of methods that keep a residual and are not sparse."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods._base.residuals import zero_residuals


class ResidualReducer(Reducer):
    """Keeps what a rank has not sent. State: ``residual``, float32, flat."""

    @property
    def residual_gain(self) -> float | None:
        return 1.0

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return zero_residuals(specs, device)
