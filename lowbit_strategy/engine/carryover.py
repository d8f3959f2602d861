"""What a method still owed when it was replaced by one that keeps no residual: said with the next gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.methods._base.base import View


class CarryOver:
    """Leftover residuals by parameter name, float32 ``[numel]`` in units of the gradient.

    Each is added once to a gradient that is not idle. If that step overflows it is owed again.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: dict[str, Tensor] = {}
        self._said: dict[str, Tensor] = {}  # in this step, which may still overflow

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def get(self, name: str) -> Tensor | None:
        return self._waiting.get(name)

    def keep(self, name: str, values: Tensor) -> None:
        if values.any():
            self._waiting[name] = values

    def release(self, name: str) -> Tensor | None:
        return self._waiting.pop(name, None)

    def say_(self, view: View) -> None:
        """Add what is owed of the view's parameter to its gradient, in place."""
        name = view.spec.name
        if name not in self._waiting or not view.x.any():
            return
        values = self._said[name] = self._waiting.pop(name)
        if view.scatter:
            padded = torch.nn.functional.pad(values, (0, view.x.numel() - values.numel()))
            view.x.add_(padded.view(view.x.shape))
        else:
            view.x.add_(values)

    def settle(self, *, counted: bool) -> None:
        """The step is over: what was said is said, or, after an overflow, owed again."""
        if not counted:
            self._waiting.update(self._said)
        self._said = {}

    def rescale_(self, factor: float) -> None:
        for values in self._waiting.values():
            values.mul_(factor)

    def forget(self) -> None:
        self._waiting, self._said = {}, {}

    def state_dict(self) -> dict[str, Any]:
        return {"world_size": self._world_size, "waiting": {k: v.cpu().clone() for k, v in self._waiting.items()}}

    def load_state_dict(self, state: dict[str, Any], device: torch.device | None = None) -> None:
        same = state["world_size"] == self._world_size  # another rank's leftovers are not this one's
        self._waiting = {k: v.to(device) for k, v in state["waiting"].items()} if same else {}
