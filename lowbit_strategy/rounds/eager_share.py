"""A rank's own share of what is under way, applied before the others' has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.rounds.anchor_optimizer import AnchorOptimizer
from lowbit_strategy.rounds.fragment import Fragment


class EagerShare:
    """How far this rank's weights are ahead of the anchors: by its own share of the mean that is under way.

    The outer optimizer is linear in its gradients, so that what is published, one step with
    ``own(t) / W + mean(t - 1) - own(t - 1) / W`` from each rank's own point, is the sum of two: the anchor, which all
    ranks move alike by the means that have arrived, and an offset, the last step of a second optimizer that sees this
    rank's ``own / W`` alone. The anchors stay the same on all ranks.

    Args:
        rule: Gives the second optimizer.
        fragments: Of the model.
        world_size: Ranks whose mean is taken, W.
    """

    def __init__(self, rule: OuterRule, fragments: Sequence[Fragment], world_size: int) -> None:
        self._world_size = world_size
        self._offsets = {name: torch.zeros_like(a) for fragment in fragments for name, a in fragment.anchors.items()}
        self._optimizer = AnchorOptimizer(rule, self._offsets)

    @torch.no_grad()
    def restart(self) -> None:
        """Weights are the anchors, and nothing has been sent yet."""
        self._optimizer.restart()
        torch._foreach_zero_(list(self._offsets.values()))

    @torch.no_grad()
    def go_ahead(self, fragment: Fragment, x_N: Tensor, step_index: int) -> None:
        """The pseudo-gradient `x_N` is about to be sent: go on from the anchor and the own share."""
        offsets = self._of(fragment)
        self._optimizer.step(fragment.views(x_N / self._world_size), step_index)
        weights, anchors = fragment.params, fragment.anchors
        for name, offset in offsets.items():
            weights[name].copy_(anchors[name] + offset)

    @torch.no_grad()
    def leave(self, fragment: Fragment) -> None:
        """The anchor is about to move: remember where this rank's weights have begun."""
        anchors = fragment.anchors
        for name, offset in self._of(fragment).items():
            offset.add_(anchors[name])

    @torch.no_grad()
    def arrive(self, fragment: Fragment) -> None:
        """The anchor has moved: what this rank has trained since goes on from there."""
        weights, anchors = fragment.params, fragment.anchors
        for name, start in self._of(fragment).items():
            weights[name].copy_(weights[name].float() + (anchors[name] - start))
            start.zero_()

    def _of(self, fragment: Fragment) -> dict[str, Tensor]:
        return {name: self._offsets[name] for name in fragment.anchors}

    def state_dict(self) -> dict[str, Any]:
        """Tensors are the live ones."""
        return {"offsets": self._offsets, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, offset in self._offsets.items():
            if name in state["offsets"]:
                offset.copy_(state["offsets"][name])
                self._optimizer.load(name, state["optimizer"].get(name, {}))
