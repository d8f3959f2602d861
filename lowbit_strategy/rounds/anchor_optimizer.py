"""The outer optimizer, of tensors that have names, with a learning rate that the rule changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.methods.outer.rule import OuterRule


class AnchorOptimizer:
    """Args:
    rule: Gives the optimizer, and the factor of its rate.
    tensors: What it steps, by name.
    """

    def __init__(self, rule: OuterRule, tensors: Mapping[str, Tensor]) -> None:
        self._rule = rule
        self._tensors = dict(tensors)
        self._optimizer = rule.optimizer(list(self._tensors.values()))
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self._optimizer).__name__

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], steps: float) -> None:
        """Args:
        gradients: Of the tensors that are to be stepped.
        steps: Optimizer steps that ranks have completed.
        """
        for name, gradient in gradients.items():
            self._tensors[name].grad = gradient
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._rule.rate_factor(steps)
        self._optimizer.step()
        for name in gradients:
            self._tensors[name].grad = None

    def restart(self) -> None:
        """Forget where the tensors were moving."""
        self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """What it keeps of each tensor, live."""
        return {name: dict(self._optimizer.state.get(tensor, {})) for name, tensor in self._tensors.items()}

    def load(self, name: str, kept: Mapping[str, Any]) -> None:
        """Of one tensor, as `state_dict` gave it."""
        tensor = self._tensors[name]
        self._optimizer.state[tensor] = {key: _like(value, tensor) for key, value in kept.items()}


def _like(value: Any, tensor: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(tensor.device, copy=True) if value.dim() else value.clone()
