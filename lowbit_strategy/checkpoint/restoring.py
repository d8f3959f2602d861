"""Restores residuals on all ranks: each rank's own, or all from zero.

A rank without its file must not continue alone, because methods may rely on state being the same on all ranks, and an
error on a single rank would hang the others.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.agreement import OnMissingResidual, Problem, agree_on_problem
from lowbit_strategy.checkpoint.capture import Saved, columns_of, reduced_by, topologies_of
from lowbit_strategy.checkpoint.residual_files import ADVICE, ResidualFile, ResidualFileError, Stamp
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.collectives.layout import MemoryOrder, add_part_, in_memory_order
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.method_state import sum_of_known
from lowbit_strategy.inform import listed
from lowbit_strategy.methods._base.method import unsent_part

OnWorldSizeChange = Literal["reset", "fold"]

_log = logging.getLogger("lowbit_strategy")


def restore_on_all_ranks(
    sync: GradientSync,
    path: Any,
    stamp: Stamp,
    *,
    on_world_size_change: OnWorldSizeChange,
    on_missing_residual: OnMissingResidual | None,
) -> None:
    """Restore what was saved next to the checkpoint `path`. Call it on all ranks, with the same stamp.

    Args:
        sync: The engine of the saved model.
        path: The checkpoint.
        stamp: The checkpoint's stamp.
        on_world_size_change: See `restore`.
        on_missing_residual: The policy for missing or unusable files; see `agree_on_problem`.

    Raises:
        ResidualFileError: On every rank, if files of any rank are unusable and required.
        ValueError: On every rank, if the residuals belong to a different model.
    """
    before = copy.deepcopy(_shared(sync))
    problem = _restore_own(sync, path, stamp, on_world_size_change)
    if (warning := agree_on_problem(problem, on_missing_residual, sync.ranks.group)) is None:
        return
    if sync.ranks.logs:
        _log.warning("%s; continuing with residuals of zero on all ranks", warning)
    _start_from_zero(sync, stamp, before, can_read=problem is None)


def _restore_own(sync: GradientSync, path: Any, stamp: Stamp, policy: OnWorldSizeChange) -> Problem | None:
    """Restore. Return a description of what has gone wrong, if anything."""
    rank_then = sync.ranks.everyone.rank % stamp["world_size"]

    def load_rank(rank: int) -> Saved:
        return residual_files.load(path, ResidualFile.of_stamp(stamp, rank))

    try:
        saved = _saved_by_own(sync, stamp["world_size"], load_rank)
        restore(sync, saved, load_rank=load_rank, on_world_size_change=policy)
    except (ResidualFileError, ValueError) as error:
        return Problem.of(error)
    except Exception as error:  # a file with a different structure can fail in any way
        name = residual_files.path_of(path, ResidualFile.of_stamp(stamp, rank_then))
        cause = f"{type(error).__name__}: {error}"
        text = f"the checkpoint's residual file {name}*.pt cannot be restored ({cause}): {ADVICE}"
        return Problem(text, "unusable")
    return None


def _shared(sync: GradientSync) -> dict[str, Any]:
    """The state that is the same on all ranks."""
    progress = {"num_skipped": sync.num_skipped, "loss_scale": sync.loss_scale}
    return {"progress": progress, "extra": {name: part.state_dict() for name, part in sync.extra_state.items()}}


def _start_from_zero(sync: GradientSync, stamp: Stamp, before: dict[str, Any], *, can_read: bool) -> None:
    """Start residuals from zero. Counters and controllers continue from the first rank that could read them; if there
    is none, controllers are unchanged.
    """
    group = sync.ranks.group
    readers = gathered(can_read, group, "agreeing on a checkpoint's residual files")
    shared = [before]
    if any(readers):
        shared = [_shared(sync)]
        dist.broadcast_object_list(shared, group_src=readers.index(True), group=group)
    sync.restore_progress(step_index=stamp["step_index"], **shared[0]["progress"])
    if not can_read:
        for name, part in sync.extra_state.items():
            part.load_state_dict(shared[0]["extra"][name])
    for rank_part in sync.rank_state.values():
        rank_part.forget()
    sync.forget()


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
    own = (saved["topologies"], saved["columns"]) == (topologies_of(sync), columns_of(sync))
    for name, rank_part in sync.rank_state.items():
        if name in saved["own"]:
            rank_part.load_state_dict(_everyones(sync, name, saved, load_rank), own=own)
    for name, part in sync.extra_state.items():
        if name in saved["extra"]:
            part.load_state_dict(saved["extra"][name])
    sync.forget()
    if saved["reduces"] != reduced_by(sync):
        if sync.ranks.logs:
            _log.warning(
                "the checkpoint's residuals are of %s, but this run reduces %s: residuals start from zero",
                saved["reduces"],
                reduced_by(sync),
            )
        return
    if not own:
        _change_world_size(sync, saved, load_rank, on_world_size_change)
        return
    for name, entry in saved["parameters"].items():
        _restore_parameter(sync, name, entry)


def _saved_by_own(sync: GradientSync, num_saved: int, load_rank: Callable[[int], Saved]) -> Saved:
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
