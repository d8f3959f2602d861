"""Captures and restores the state of one rank: residuals, thresholds and counters, by parameter name.

State is tensors, numbers, strings and dicts, so it loads with ``weights_only=True``. A parameter's tensors are saved in
their memory format, so that they are restored exactly if nothing changes. They come with the numbers needed to compute
what has not been sent yet, for a different layout, method or number of ranks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import MemoryOrder, add_part_, in_memory_order
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.method_state import sum_of_known
from lowbit_strategy.inform import listed
from lowbit_strategy.methods._base.method import unsent_part
from lowbit_strategy.model.parameters import local_part

FORMAT = 6
_SMALL_NBYTES = 1 << 20  # smaller tensors are copied to page-locked memory, which is never returned to the system
OnWorldSizeChange = Literal["reset", "fold"]
Saved = dict[str, Any]

_log = logging.getLogger(__name__)


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
        "columns": _columns(sync),
        "places": [[ranks.rank, ranks.world_size] for ranks in sync.all_ranks],
        "topologies": _topologies(sync),
        "step_index": sync.step_index,
        "num_skipped": sync.num_skipped,
        "loss_scale": sync.loss_scale,
        "parameters": {name: _capture_parameter(sync, name) for name in sync.specs},
        "extra": {name: part.state_dict() for name, part in sync.extra_state.items()},
        "own": {name: _on_cpu(part.state_dict()) for name, part in sync.rank_state.items()},
        "reduces": _reduced(sync),
    }


def check_last_step(sync: GradientSync) -> None:
    """Check the flags that the host has not waited for yet, because training ends or is saved.

    Raises:
        RuntimeError: A rank sent a message with a different layout in one of the last steps.
    """
    sync.transactions.flags.raise_if_broken(sync.ranks.rank, waits=True)
    for part in sync.outside_buckets:
        part.flags.raise_if_broken(sync.ranks.rank, waits=True)


def _topologies(sync: GradientSync) -> list[list[int]]:
    """``[world_size, num_peers, num_parts, whether parts are shards of several nodes]`` for each mesh that has
    parameters; each replica that comes and goes has its own.
    """
    found = []
    for ranks in sync.all_ranks:
        parts = [1, 0] if ranks.intra_node is None else [ranks.intra_node.world_size, int(sync.sharded)]
        found.append([sync.ranks.everyone.world_size, 1 if ranks.comes_and_goes else ranks.peers.world_size, *parts])
    return found


def _columns(sync: GradientSync) -> list[int]:
    """The part of the model that this rank has on each mesh."""
    return [ranks.column for ranks in sync.all_ranks]


def _mesh_of(sync: GradientSync, name: str) -> int:
    """The index of a parameter's mesh in `GradientSync.all_ranks`."""
    own = sync.state.ranks_of(name)
    return next(at for at, ranks in enumerate(sync.all_ranks) if ranks is own)


def _reduced(sync: GradientSync) -> str:
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


def restore(
    sync: GradientSync, saved: Saved, *, load_rank: Callable[[int], Saved], on_world_size_change: OnWorldSizeChange
) -> None:
    """Restore saved state.

    1. counters, controllers and other state
    2. in the same topology, a parameter with the same method and layout gets its exact state, and any other gets its
       old method's unsent residual
    3. in a different topology, `on_world_size_change` decides

    Args:
        sync: The engine of the saved model; its compressor may have changed.
        saved: This rank's state, or any rank's if the world size has changed.
        load_rank: Loads the state of any rank of the run that saved.
        on_world_size_change: ``reset``: residuals start from zero; ``fold``: every rank gets the mean of the saved
            ranks' unsent residuals, so nothing is lost.

    Raises:
        ValueError: The state belongs to a different model.
    """
    _check_model(sync, saved)
    sync.restore_progress(
        step_index=saved["step_index"], num_skipped=saved["num_skipped"], loss_scale=saved["loss_scale"]
    )
    own = (saved["topologies"], saved["columns"]) == (_topologies(sync), _columns(sync))
    for name, rank_part in sync.rank_state.items():
        if name in saved["own"]:
            rank_part.load_state_dict(_everyones(sync, name, saved, load_rank), own=own)
    for name, part in sync.extra_state.items():
        if name in saved["extra"]:
            part.load_state_dict(saved["extra"][name])
    sync.forget()
    if saved["reduces"] != _reduced(sync):
        if sync.ranks.logs:
            _log.warning(
                "the checkpoint's residuals are of %s, but this run reduces %s: residuals start from zero",
                saved["reduces"],
                _reduced(sync),
            )
        return
    if not own:
        _change_world_size(sync, saved, load_rank, on_world_size_change)
        return
    for name, entry in saved["parameters"].items():
        _restore_parameter(sync, name, entry)


def saved_by_own(sync: GradientSync, num_saved: int, load_rank: Callable[[int], Saved]) -> Saved:
    """The state of the saved rank that had the same part of the model along the other mesh dims, and the same place
    among the ranks that average gradients. Usually this is the rank with the same number.

    Raises:
        ValueError: No rank had this part.
    """
    number, own = sync.ranks.everyone.rank % num_saved, sync.all_ranks
    for rank in (number, *range(num_saved)):
        saved = load_rank(rank)
        theirs = zip(saved["columns"], saved["places"], own, strict=False)
        if all((column, at) == (ranks.column, ranks.rank % count) for column, (at, count), ranks in theirs):
            return saved
    raise ValueError(
        "the residuals next to the checkpoint belong to a model in fewer parts: resume with the tensor-parallel size"
        ' that it was saved with, or pass on_missing_residual="reset" to continue with residuals of zero'
    )


def _everyones(
    sync: GradientSync, name: str, saved: Saved, load_rank: Callable[[int], Saved]
) -> Iterator[Mapping[str, Any]]:
    """All ranks' saved states under one name, for `RankState`."""
    yield saved["own"][name]
    for each in map(load_rank, range(saved["world_size"])):
        other = {n for n, p in each["parameters"].items() if n in sync.specs and not _has_own_part(sync, n, p, each)}
        yield _without(each["own"][name], other)


def _has_own_part(sync: GradientSync, name: str, entry: Saved, saved: Saved) -> bool:
    """Whether the saved rank had the same part of a parameter as this rank along the other dims of its mesh."""
    own: bool = saved["columns"][entry["mesh"]] == sync.state.ranks_of(name).column
    return own


def _without(value: Any, names: Collection[str]) -> Any:
    """Nested plain data without the entries of these names."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without(each, names) for key, each in value.items() if key not in names}


def keep_fitting(sync: GradientSync, saved: Saved) -> bool:
    """Remove from `saved`, with a warning, parameters that the model no longer has in the same shape.

    Returns:
        Whether the model has the same parameters as before.
    """
    own = {name: list(spec.shape) for name, spec in sync.state.full_specs.items()}
    shapes = {name: entry["shape"] for name, entry in saved["parameters"].items()}
    lost = [name for name, shape in shapes.items() if own.get(name) != shape]
    saved["parameters"] = {name: entry for name, entry in saved["parameters"].items() if name not in lost}
    if lost and sync.ranks.logs:
        _log.warning(
            "the model has changed since compression was first attached to it: the residuals of %s start over",
            listed(lost),
        )
    return own == shapes


def _check_model(sync: GradientSync, saved: Saved) -> None:
    """Check that parameters match. Those that were not trained when the state was saved start from zero."""
    own = {name: list(spec.shape) for name, spec in sync.state.full_specs.items()}
    shapes = {name: entry["shape"] for name, entry in saved["parameters"].items()}
    unknown = sorted(shapes.keys() - own.keys())
    changed = sorted(name for name in own if name in shapes and own[name] != shapes[name])
    parts = [
        f"{what}: {listed(names)}"
        for what, names in (("not in the model", unknown), ("of another shape", changed))
        if names
    ]
    if parts:
        raise ValueError(
            f"the residuals next to the checkpoint belong to a different model ({'; '.join(parts)}): load the"
            " checkpoint"
            ' into the model that wrote it, or pass on_missing_residual="reset" to continue with residuals of zero'
        )


def _copy_into(targets: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> bool:
    """Copy if every tensor has a counterpart, otherwise copy nothing."""
    same = targets.keys() == saved.keys() and all(
        value.shape == saved[key].shape and value.dtype == saved[key].dtype for key, value in targets.items()
    )
    if same:
        for key, value in targets.items():
            value.copy_(saved[key])
    return same


def _restore_parameter(sync: GradientSync, name: str, entry: Saved) -> None:
    memory_order = sync.specs[name].memory_order
    same = entry["numbers"] == sync.state.store(name).numbers(name) and entry["memory_order"] == memory_order
    if same and _copy_into(sync.state.tensors(name), entry["tensors"]):
        if entry["carryover"] is not None:
            sync.state.carryover.add(name, entry["carryover"])
    elif (unsent := _unsent(entry, memory_order)) is not None:
        _carry_over_(sync, name, unsent)


def _carry_over_(sync: GradientSync, name: str, whole_N: Tensor) -> None:
    """Make this rank's part of the unsent `whole_N` its residual."""
    sync.state.carry_over_(name, sync.specs[name].take(whole_N).to(sync.device))


def _unsent(entry: Saved, memory_order: MemoryOrder) -> Tensor | None:
    """A saved rank's unsent residual of a whole parameter, in units of the gradient and in `memory_order`."""
    unsent = sum_of_known(unsent_part(entry["tensors"], entry["numbers"]), entry["carryover"])
    if unsent is None:
        return None
    whole = torch.zeros(math.prod(entry["shape"]), dtype=torch.float32)
    add_part_(whole, entry["runs"], unsent)
    return in_memory_order(whole, entry["shape"], entry["memory_order"], memory_order)


def _change_world_size(
    sync: GradientSync, saved: Saved, load_rank: Callable[[int], Saved], policy: OnWorldSizeChange
) -> None:
    (old, *_), new = saved["topologies"][0], sync.ranks.everyone.world_size
    if sync.ranks.logs:
        what = "start from zero" if policy == "reset" else "are averaged over the old ranks"
        if old != new:
            _log.warning("the number of ranks changed from %d to %d: compression residuals %s", old, new, what)
        else:
            _log.warning("the ranks are grouped into other nodes or replicas: compression residuals %s", what)
    if policy == "reset":
        return
    totals: dict[str, Tensor] = {}
    for each in map(load_rank, range(old)):
        for name, entry in each["parameters"].items():
            if not _has_own_part(sync, name, entry, each):
                continue
            if (unsent := _unsent(entry, sync.specs[name].memory_order)) is not None:
                totals[name] = totals[name].add_(unsent) if name in totals else unsent.clone()
    for name, total in totals.items():
        _, num_together, *_ = saved["topologies"][saved["parameters"][name]["mesh"]]
        _carry_over_(sync, name, total / num_together)
