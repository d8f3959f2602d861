"""Accelerate's optimizer for compressed gradients."""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer


class SteppingOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer, which also tells the binding when a step has ended, even one that a loss scaler skips."""

    lowbit: Any = None  # the binding

    def step(self, closure: Any = None) -> None:
        if self.lowbit is None:
            super().step(closure)
            return
        with self.lowbit.scaled(self, closure) as scaled:
            super().step(scaled)
        if self.gradient_state.sync_gradients:
            self.lowbit.end_step(self)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in super().__getstate__().items() if key != "lowbit"}
