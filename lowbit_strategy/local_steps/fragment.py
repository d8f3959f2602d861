"""A fragment of a model: parameters that synchronize together, and their anchor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.kernels.reference.rng import sample_positions
from lowbit_strategy.local_steps.cutting import buckets_of
from lowbit_strategy.local_steps.header import SAMPLE_NUMEL
from lowbit_strategy.model.parameters import local_part, shaped


class Fragment:
    """Parameters that synchronize together.

    Args:
        specs: Specs of the fragment's parameters, for each of `GradientSync.all_ranks`.
        params: All parameters by name; of a sharded parameter the local shard is synchronized.

    Attributes:
        anchors: The weights that all ranks share: float32, by name, views of one flat tensor.
        sample: Positions of the elements from which the drift of ranks is measured.
        buckets: The buckets, at least one: each has the index in `GradientSync.all_ranks` of the ranks that reduce it,
            its layout, and its slice of the pseudo-gradient.
    """

    def __init__(self, specs: Sequence[Sequence[TensorSpec]], params: Mapping[str, Tensor]) -> None:
        self._specs = [spec for part in specs for spec in part]
        self._params = {spec.name: params[spec.name] for spec in self._specs}
        self.numel = sum(spec.numel for spec in self._specs)
        self.buckets = _buckets(specs)
        device = next(iter(self.params.values())).device
        self.sample = sample_positions(self.numel, min(self.numel, SAMPLE_NUMEL), 0, device)
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
        """The anchor, rounded to the weights' dtype, minus the weights: float32 ``[numel]``."""
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


def _buckets(specs: Sequence[Sequence[TensorSpec]]) -> list[tuple[int, BucketLayout, slice]]:
    buckets = [(place, bucket) for place, part in enumerate(specs) for bucket in buckets_of(part)]
    found, at = [], 0
    for number, (place, bucket) in enumerate(buckets, 1):
        entries, start = [], at
        for spec in bucket:
            if spec.numel:  # under HSDP this rank may have an empty shard
                entries.append((spec.name, at - start))
            at += spec.numel
        found.append((place, BucketLayout(tuple(entries), last=number == len(buckets)), slice(start, at)))
    return found
