"""Cuts the saved state of local steps for a different number of ranks per replica."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync


def cut_again(sync: GradientSync, own: Mapping[str, Any], everyone: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `own` with anchors, their moments and means in flight cut like this rank's current parts. Ranks saved
    their parts, which are the same on all replicas, so the parts of the first ranks that have all of a parameter are
    joined.
    """
    specs = {name: sync.specs[name] for name in own["anchors"] if name in sync.specs}
    if all(own["anchors"][name].shape == spec.shape for name, spec in specs.items()):
        return dict(own)
    flight: Mapping[str, Any] = own["flight"] or {"means": {}}
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in specs}
    missing = {name: spec.whole_numel for name, spec in specs.items()}
    while any(left > 0 for left in missing.values()):
        each = next(everyone)
        for name in [name for name in specs if name in each["anchors"]]:
            mean = {"in flight": each["flight"]["means"][name]} if name in flight["means"] else {}
            found[name].append(each["optimizer"][name] | {"anchor": each["anchors"][name]} | mean)
            missing[name] -= each["anchors"][name].numel()

    def cut(name: str, key: str) -> Any:
        values, spec = [part[key] for part in found[name]], specs[name]
        if not isinstance(values[0], Tensor) or values[0].shape != found[name][0]["anchor"].shape or not spec.ndim:
            return values[0]
        whole = torch.cat([value.reshape(-1) for value in values])
        return spec.take(whole[: spec.whole_numel]).view(spec.shape)

    others = ("anchor", "in flight")
    optimizer = {name: {key: cut(name, key) for key in found[name][0] if key not in others} for name in specs}
    means = {name: cut(name, "in flight") for name in specs if name in flight["means"]}
    return {
        **own,
        "anchors": {name: cut(name, "anchor") for name in specs},
        "optimizer": optimizer,
        "flight": own["flight"] and {**flight, "means": means},
    }
