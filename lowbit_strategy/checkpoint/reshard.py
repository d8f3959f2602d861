"""What ranks share of local steps, cut anew where another number of ranks has a model together.

Anchors, the outer optimizer's moments and a fragment under way are saved as each rank's shards. All replicas have the
same, so those of the first one are put together, and each rank takes its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import add_ranges_
from lowbit_strategy.engine.engine import GradientSync

Saved = dict[str, Any]


def shared_state(
    sync: GradientSync, state: str, *, num_shards: int, load_rank: Callable[[int], Saved]
) -> Mapping[str, Any]:
    """One rank's state under ``own`` as this rank would have saved it, as far as it is shared: of the first replica.

    Args:
        sync: This rank's engine.
        state: The name of the state.
        num_shards: Ranks that had a model together: the first ones.
        load_rank: State of a rank of the run that saved.
    """
    ranks = [load_rank(rank) for rank in range(num_shards)]
    states = [rank["own"][state] for rank in ranks]
    if all(entry["ranges"] == _ranges(sync, name) for name, entry in ranks[0]["parameters"].items()):
        return states[0]
    return _cut(sync, [rank["parameters"] for rank in ranks], states, None)


def _ranges(sync: GradientSync, name: str) -> list[list[int]] | None:
    part = sync.specs[name].part
    return None if part is None else [list(run) for run in part.ranges]


def _cut(sync: GradientSync, entries: list[Saved], values: list[Any], name: str | None) -> Any:
    """Nested plain data; tensors under a parameter's name that are of its shards' shapes are cut anew."""
    first = values[0]
    if isinstance(first, Mapping):
        return {
            key: _cut(sync, entries, [value[key] for value in values], key if key in sync.specs else name)
            for key in first
            if all(key in value for value in values)
        }
    if name is None or name not in entries[0] or not isinstance(first, Tensor):
        return first
    parts = [(entry[name], value) for entry, value in zip(entries, values, strict=True)]
    if any(value.numel() != _numel(entry) or not value.dim() for entry, value in parts):
        return first  # a counter
    spec = sync.specs[name]
    whole = torch.zeros(math.prod(spec.whole.shape), dtype=first.dtype)
    for entry, value in parts:
        ranges = entry["ranges"] if entry["ranges"] is not None else [[0, whole.numel()]]
        add_ranges_(whole, ranges, value.reshape(-1))
    return (whole if spec.part is None else spec.part.take(whole)).view(spec.shape)


def _numel(entry: Saved) -> int:
    ranges = entry["ranges"]
    return math.prod(entry["shape"]) if ranges is None else sum(length for _, length in ranges)
