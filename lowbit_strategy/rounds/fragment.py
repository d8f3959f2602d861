"""A fragment of a model: parameters that synchronize together, their anchor, and the optimizers that move it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.sampling import spread_sample
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.model.parameters import local_part, shaped
from lowbit_strategy.plan.rounds import SAMPLE_NUMEL, buckets_of


class Fragment:
    """Args:
        specs: Of the fragment's parameters.
        params: All parameters by name; of a sharded one the local shard is synchronized.

    Attributes:
        anchors: The weights that all ranks share: float32, by name, views of one flat tensor.
        sample: Positions of the elements from which the drift of ranks is measured.
        buckets: Layout of each bucket, and its slice of the pseudo-gradient; at least one.
    """

    def __init__(self, specs: Sequence[TensorSpec], params: Mapping[str, Tensor]) -> None:
        self._specs = list(specs)
        self._params = {spec.name: params[spec.name] for spec in specs}
        self.numel = sum(spec.numel for spec in specs)
        self.buckets = _buckets(self._specs)
        device = next(iter(self.params.values())).device
        self.sample = spread_sample(self.numel, SAMPLE_NUMEL, 0, device).positions_N
        self._anchor = torch.empty(self.numel, dtype=torch.float32, device=device)
        self.anchors = self.views(self._anchor)
        self.rebase()

    @property
    @torch.no_grad()
    def params(self) -> dict[str, Tensor]:
        """The weights as this rank holds them, by name."""
        return {name: local_part(param) for name, param in self._params.items()}

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Views of a flat tensor by name, in the shape and memory order of the parameters."""
        parts = flat_N.split([spec.numel for spec in self._specs])
        return {spec.name: shaped(part, spec) for part, spec in zip(parts, self._specs, strict=True)}

    @torch.no_grad()
    def rebase(self) -> None:
        """Set the anchor to the current weights."""
        torch._foreach_copy_(list(self.anchors.values()), list(self.params.values()))

    @torch.no_grad()
    def pseudo_gradient(self) -> Tensor:
        """float32 ``[numel]``: the anchor, rounded to the type of the weights, minus the weights."""
        x_N = torch.empty_like(self._anchor)
        weights = self.params
        for name, part in self.views(x_N).items():
            weight, anchor = weights[name], self.anchors[name]
            if weight.dtype == torch.float32:
                torch.sub(anchor, weight, out=part)
            else:
                part.copy_(anchor.to(weight.dtype)).sub_(weight)
        return x_N

    @torch.no_grad()
    def pull_(self, mix: float) -> None:
        """``weights = mix * weights + (1 - mix) * anchor``."""
        weights, anchors = list(self.params.values()), list(self.anchors.values())
        if mix == 0.0:
            torch._foreach_copy_(weights, anchors)
            return
        for weight, anchor in zip(weights, anchors, strict=True):
            weight.copy_(torch.lerp(anchor, weight.float(), mix))


def _buckets(specs: Sequence[TensorSpec]) -> list[tuple[BucketLayout, slice]]:
    buckets, at = buckets_of(specs), 0
    found = []
    for bucket in buckets:
        entries, start = [], at
        for spec in bucket:
            if spec.numel:  # under HSDP this rank may have an empty shard
                entries.append((spec.name, at - start))
            at += spec.numel
        found.append((BucketLayout(tuple(entries), last=bucket is buckets[-1]), slice(start, at)))
    return found


class AnchorOptimizer:
    """The outer optimizer, of named tensors, with a learning rate that the rule changes.

    Args:
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
        """Step the tensors that `gradients` names; ranks have completed `steps` optimizer steps."""
        for name, gradient in gradients.items():
            self._tensors[name].grad = gradient
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * self._rule.rate_factor(steps)
        self._optimizer.step()
        for name in gradients:
            self._tensors[name].grad = None

    def restart(self) -> None:
        """Forget all moments."""
        self._optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        """By name; tensors are the live ones."""
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
    """Applies this rank's contribution before the all-reduce completes: how far its weights are ahead of the anchors.

    The outer optimizer is linear in its gradients, so the published step with
    ``own(t) / W + mean(t - 1) - own(t - 1) / W`` from each rank's own point is the sum of two: the anchor, which all
    ranks move alike by the means that have arrived, and an offset, the last step of a second optimizer that sees this
    rank's ``own / W`` alone. The anchors stay the same on all ranks.

    Args:
        rule: Gives the second optimizer.
        fragments: Of the model.
        world_size: W, the ranks of the mean.
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
    def before_sending(self, fragment: Fragment, x_N: Tensor, step_index: int) -> None:
        """Continue from the anchor plus this rank's share of the pseudo-gradient `x_N`."""
        self._optimizer.step(fragment.views(x_N / self._world_size), step_index)
        weights = fragment.params
        for name, anchor in fragment.anchors.items():
            weights[name].copy_(anchor + self._offsets[name])

    @torch.no_grad()
    def before_anchor_moves(self, fragment: Fragment) -> None:
        """Remember where this rank's weights started."""
        for name, anchor in fragment.anchors.items():
            self._offsets[name].add_(anchor)

    @torch.no_grad()
    def after_anchor_moved(self, fragment: Fragment) -> None:
        """What this rank has trained since continues from the new anchor."""
        weights = fragment.params
        for name, anchor in fragment.anchors.items():
            start = self._offsets[name]
            weights[name].copy_(weights[name].float() + (anchor - start))
            start.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Tensors are the live ones."""
        return {"offsets": self._offsets, "optimizer": self._optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, offset in self._offsets.items():
            if name in state["offsets"]:
                offset.copy_(state["offsets"][name])
                self._optimizer.load(name, state["optimizer"].get(name, {}))
