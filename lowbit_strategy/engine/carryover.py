"""Leftover residuals: what a replaced method had not sent yet, added to the next gradient of a method without one."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.methods._base.reducer import View


class CarryOver:
    """Leftover residuals by parameter name, float32 ``[numel]`` in units of the gradient.

    Each is added once to a gradient that is not all zero. If that step overflows it is kept and added again.

    Args:
        device: Of gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waiting: dict[str, Tensor] = {}
        self._added: dict[str, Tensor] = {}  # in this step, which may still overflow

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def get(self, name: str) -> Tensor | None:
        return self._waiting.get(name)

    def keep(self, name: str, values: Tensor) -> None:
        """Add `values` to the next gradient of `name`."""
        if values.any():
            self._waiting[name] = values.to(self._device)

    def release(self, name: str) -> Tensor | None:
        """Remove and return the carryover of `name`, for a method that keeps a residual itself."""
        return self._waiting.pop(name, None)

    def add_to_(self, view: View) -> None:
        """Add what is kept for the view's parameter to its gradient, in place."""
        name = view.spec.name
        if name not in self._waiting or not view.x.any():
            return
        values = self._added[name] = self._waiting.pop(name)
        view.x.add_(view.rows(values) if view.scatter else values)

    def end_step(self, *, counted: bool) -> None:
        """The step is over. After an overflow what was added is kept for the next step."""
        if not counted:
            self._waiting.update(self._added)
        self._added = {}

    def rescale_(self, factor: float) -> None:
        for values in self._waiting.values():
            values.mul_(factor)

    def forget(self) -> None:
        self._waiting, self._added = {}, {}
