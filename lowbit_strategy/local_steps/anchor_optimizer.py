"""The outer optimizer, which steps the anchors, and eager updates of a rank's own part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.local_steps.fragment import Fragment
from lowbit_strategy.local_steps.rule import OuterRule


class AnchorOptimizer:
    """The outer optimizer of named tensors.

    Args:
        rule: The rule that makes the optimizer.
        tensors: The tensors that it steps, by name.
    """

    def __init__(self, rule: OuterRule, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)
        self._optimizer = rule.optimizer(list(self._tensors.values()))

    @property
    def kind(self) -> str:
        """The name of its class."""
        return type(self._optimizer).__name__

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Step the tensors that `gradients` names."""
        for name, gradient in gradients.items():
            self._tensors[name].grad = gradient
        self._optimizer.step()
        for name in gradients:
            self._tensors[name].grad = None

    def restart(self) -> None:
        """Forget all moments."""
        self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """The state by name; tensors are not copied."""
        return {name: dict(self._optimizer.state.get(tensor, {})) for name, tensor in self._tensors.items()}

    def load(self, name: str, kept: Mapping[str, Any]) -> None:
        """One tensor's entry of `state_dict`."""
        tensor = self._tensors[name]
        self._optimizer.state[tensor] = {key: _like(value, tensor) for key, value in kept.items()}


def _like(value: Any, tensor: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.to(tensor.device, copy=True) if value.dim() else value.clone()


class EagerUpdate:
    """Applies this rank's contribution before the all-reduce completes, and tracks how far its weights are ahead of the
    anchors.

    The outer optimizer is linear in its gradients, so the published step with ``own(t) / W + mean(t - 1) - own(t - 1) /
    W`` from each rank's own point is a sum of two: the anchor, which all ranks move by the means that have arrived, and
    an offset, which is the last step of a second optimizer that sees only this rank's ``own / W``. The anchors stay the
    same on all ranks.

    Args:
        rule: The rule that makes the second optimizer.
        fragments: Fragments of the model.
        world_size: W, the ranks of the mean.
    """

    def __init__(self, rule: OuterRule, fragments: Sequence[Fragment], world_size: int) -> None:
        self._world_size = world_size
        self._offsets = {name: torch.zeros_like(a) for fragment in fragments for name, a in fragment.anchors.items()}
        self._optimizer = AnchorOptimizer(rule, self._offsets)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart with the weights equal to the anchors and nothing sent."""
        self._optimizer.restart()
        torch._foreach_zero_(list(self._offsets.values()))

    @torch.no_grad()
    def before_sending(self, fragment: Fragment, x_N: Tensor) -> None:
        """Continue from the anchor plus this rank's share of the pseudo-gradient `x_N`."""
        self._optimizer.step(fragment.views(x_N / self._world_size))
        weights = fragment.params
        for name, anchor in fragment.anchors.items():
            weights[name].copy_(anchor + self._offsets[name])

    @contextlib.contextmanager
    def moving_with(self, fragment: Fragment) -> Iterator[None]:
        """A context in which the anchor moves. This rank's progress since sending continues from the new anchor."""
        for name, anchor in fragment.anchors.items():
            self._offsets[name].add_(anchor)  # the weights' starting point
        yield
        weights = fragment.params
        for name, anchor in fragment.anchors.items():
            start = self._offsets[name]
            weights[name].copy_(weights[name].float() + (anchor - start))
            start.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The state; tensors are not copied."""
        return {"offsets": self._offsets, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, offset in self._offsets.items():
            if name in state["offsets"]:
                offset.copy_(state["offsets"][name])
                self._optimizer.load(name, state["optimizer"].get(name, {}))
