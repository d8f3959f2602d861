"""Captures the state of one rank: residuals, thresholds and counters, by parameter name.

State is tensors, numbers, strings and dicts, so it loads with ``weights_only=True``. A parameter's tensors are saved in
their memory format, so that they are restored exactly if nothing changes. They come with the numbers needed to compute
what has not been sent yet, for a different layout, method or number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.parameters import local_part

FORMAT = 6
_SMALL_NBYTES = 1 << 20  # smaller tensors are copied to page-locked memory, which is never returned to the system
Saved = dict[str, Any]


def capture(sync: GradientSync) -> Saved:
    """A copy of all state of this rank on the CPU. Call it between steps only."""
    sync.follow_phase()  # a restored engine starts with the phase of the next step
    with sync.taken_back():
        captured = _capture(sync)
    check_last_step(sync)
    if sync.device.type == "cuda":
        torch.cuda.synchronize(sync.device)
    return captured


def _capture(sync: GradientSync) -> Saved:
    return {
        "format": FORMAT,
        "world_size": sync.ranks.everyone.world_size,
        "rank": sync.ranks.everyone.rank,
        "columns": columns_of(sync),
        "places": [[ranks.rank, ranks.world_size] for ranks in sync.all_ranks],
        "topologies": topologies_of(sync),
        "step_index": sync.step_index,
        "num_skipped": sync.num_skipped,
        "loss_scale": sync.loss_scale,
        "parameters": {name: _capture_parameter(sync, name) for name in sync.specs},
        "extra": {name: part.state_dict() for name, part in sync.extra_state.items()},
        "own": {name: _on_cpu(part.state_dict()) for name, part in sync.rank_state.items()},
        "reduces": reduced_by(sync),
    }


def check_last_step(sync: GradientSync) -> None:
    """Check the flags that the host has not waited for yet, because training ends or is saved.

    Raises:
        RuntimeError: A rank sent a message with a different layout in one of the last steps.
    """
    sync.transactions.flags.raise_if_broken(sync.ranks.rank, waits=True)
    for part in sync.outside_buckets:
        part.flags.raise_if_broken(sync.ranks.rank, waits=True)


def topologies_of(sync: GradientSync) -> list[list[int]]:
    """``[world_size, num_peers, num_parts, whether parts are shards of several nodes]`` for each mesh that has
    parameters; each replica that comes and goes has its own.
    """
    found = []
    for ranks in sync.all_ranks:
        parts = [1, 0] if ranks.intra_node is None else [ranks.intra_node.world_size, int(sync.sharded)]
        found.append([sync.ranks.everyone.world_size, 1 if ranks.comes_and_goes else ranks.peers.world_size, *parts])
    return found


def columns_of(sync: GradientSync) -> list[int]:
    """The part of the model that this rank has on each mesh."""
    return [ranks.column for ranks in sync.all_ranks]


def _mesh_of(sync: GradientSync, name: str) -> int:
    """The index of a parameter's mesh in `GradientSync.all_ranks`."""
    own = sync.state.ranks_of(name)
    return next(at for at, ranks in enumerate(sync.all_ranks) if ranks is own)


def reduced_by(sync: GradientSync) -> str:
    """The kind of residuals: of gradients, or of what rounds reduce."""
    return "gradients" if sync.rounds is None else "weights"


def _on_cpu(value: Any) -> Any:
    """Copy nested plain data to the CPU; of a sharded tensor, this rank's part.

    It makes one copy, not two, because memory must hold it together with the weights. Small tensors are complete once
    the device has finished.
    """
    if isinstance(value, Tensor):
        part = local_part(value.detach())
        return part.clone() if part.device.type == "cpu" else part.to("cpu", non_blocking=part.nbytes <= _SMALL_NBYTES)
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(each) for each in value)
    return value


def _capture_parameter(sync: GradientSync, name: str) -> Saved:
    leftover, spec = sync.state.carryover.get(name), sync.specs[name]
    return {
        "shape": list(spec.whole.shape),
        "mesh": _mesh_of(sync, name),
        "runs": spec.runs,
        "memory_order": spec.memory_order,
        "tensors": _on_cpu(sync.state.tensors(name)),
        "numbers": sync.state.store(name).numbers(name),
        "carryover": None if leftover is None else leftover.cpu(),
    }
