"""A fragment of a model: parameters whose weights travel together, and the anchor that all ranks share of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.sampling import spread_sample
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parts import local_part, shaped
from lowbit_strategy.plan.rounds import SAMPLE_NUMEL, buckets_of


class Fragment:
    """Args:
        specs: Of the fragment's parameters.
        params: All parameters by name. Of a sharded one it is the local shard that travels.

    Attributes:
        anchors: float32, by name, each of the shape of its parameter: views of one flat tensor.
        sample: Places of the elements from which the drift of ranks is measured.
        buckets: Parts of the pseudo-gradient, each with the places of its parameters in it. One at least.
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
        """The fragment's weights as this rank holds them, by name."""
        return {name: local_part(param) for name, param in self._params.items()}

    def views(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Parts of a flat tensor by name, in the shape and the memory order of the parameters."""
        parts = flat_N.split([spec.numel for spec in self._specs])
        return {spec.name: shaped(part, spec) for part, spec in zip(parts, self._specs, strict=True)}

    @torch.no_grad()
    def rebase(self) -> None:
        """The anchor is what the weights are now."""
        torch._foreach_copy_(list(self.anchors.values()), list(self.params.values()))

    @torch.no_grad()
    def pseudo_gradient(self) -> Tensor:
        """float32 ``[numel]``: the anchor, as a rank's weights can hold it, minus the weights.

        Weights of a smaller type round the anchor when they take it over: that is none of their own movement.
        """
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
    """Where each bucket lies in the pseudo-gradient, and the places of its parameters."""
    buckets, at = buckets_of(specs), 0
    found = []
    for bucket in buckets:
        entries, start = [], at
        for spec in bucket:
            if spec.numel:  # under HSDP this rank may have nothing of it
                entries.append(Entry(spec.name, at - start))
            at += spec.numel
        found.append((BucketLayout(tuple(entries), last=bucket is buckets[-1]), slice(start, at)))
    return found


def sharded_like(part: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state as it was saved, its tensors sharded again where their parameters are."""
    groups = getattr(part, "param_groups", None)
    if groups is None:  # a gradient scaler
        return dict(saved)
    params = [param for group in groups for param in group["params"]]
    state = {at: {key: _like(params[at], value) for key, value in kept.items()} for at, kept in saved["state"].items()}
    return {**saved, "state": state}


def _like(param: Tensor, value: Any) -> Any:
    if not isinstance(param, DTensor) or not isinstance(value, Tensor) or value.shape != param.to_local().shape:
        return value
    return DTensor.from_local(
        value.to(param.device),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
