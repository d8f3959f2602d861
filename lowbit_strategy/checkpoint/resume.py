"""Restoring residuals on all ranks together: either every rank gets its own back, or all start from zero.

A rank whose file is missing must not go its own way: methods may rely on parts of their state being the same on all
ranks, and an error on one rank alone would leave the others waiting.
"""

from __future__ import annotations

import copy
import logging
from typing import Any, Literal

import torch.distributed as dist

from lowbit_strategy.checkpoint import capture, residual_files
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange, Saved
from lowbit_strategy.checkpoint.residual_files import ADVICE, ResidualFileError
from lowbit_strategy.checkpoint.stamp import Stamp, first_problem, gather, place_of
from lowbit_strategy.engine.engine import GradientSync

OnMissingResidual = Literal["error", "reset"]

_log = logging.getLogger("lowbit_strategy")


def resume(
    sync: GradientSync,
    path: Any,
    stamp: Stamp,
    *,
    group: dist.ProcessGroup | None = None,
    on_world_size_change: OnWorldSizeChange,
    on_missing_residual: OnMissingResidual,
) -> None:
    """Put back what was saved beside the checkpoint `path`; call on all ranks, with the same stamp.

    Args:
        sync: The engine of the model that was saved.
        path: The checkpoint.
        stamp: What it holds of its residual files.
        group: All ranks; None: the default group.
        on_world_size_change: See `capture.restore`.
        on_missing_residual: ``error``, or ``reset`` to start from zero where a file cannot be used.

    Raises:
        ResidualFileError: On every rank, if a file of any rank is missing, damaged or another one.
        ValueError: On every rank, if the residuals are of another model.
    """
    before = copy.deepcopy(_shared(sync))
    error = _restore(sync, path, stamp, on_world_size_change)
    outcomes = gather(None if error is None else (isinstance(error, ValueError), str(error)), group)
    problems = [None if outcome is None else outcome[1] for outcome in outcomes]
    if (message := first_problem(problems)) is None:
        return
    if on_missing_residual == "error":
        of_another_model = next(outcome[0] for outcome in outcomes if outcome is not None)
        raise (ValueError if of_another_model else ResidualFileError)(message) from error
    if sync.ranks.rank == 0:
        _log.warning("%s; continuing with residuals of zero on all ranks", message)
    _start_from_zero(sync, stamp, before, group, [rank for rank, text in enumerate(problems) if text is None])


def _restore(sync: GradientSync, path: Any, stamp: Stamp, policy: OnWorldSizeChange) -> Exception | None:
    """What went wrong, if anything did: a `ValueError` if the files are whole, but of another model."""
    rank_then = sync.ranks.world.rank % stamp["world_size"]

    def load_rank(rank: int) -> Saved:
        return residual_files.load(path, place_of(stamp, rank))

    try:
        capture.restore(sync, load_rank(rank_then), load_rank=load_rank, on_world_size_change=policy)
    except (ResidualFileError, ValueError) as error:
        return error
    except Exception as error:  # a file of another structure fails in any way
        name, cause = residual_files.path_of(path, place_of(stamp, rank_then)), f"{type(error).__name__}: {error}"
        wrapped = ResidualFileError(f"the checkpoint's residual file {name} cannot be restored ({cause}): {ADVICE}")
        wrapped.__cause__ = error
        return wrapped
    return None


def _shared(sync: GradientSync) -> dict[str, Any]:
    """What is the same on all ranks and so can be had from any of them."""
    progress = {"num_skipped": sync.num_skipped, "loss_scale": sync.loss_scale}
    return {"progress": progress, "extra": {name: part.state_dict() for name, part in sync.extra_state.items()}}


def _start_from_zero(
    sync: GradientSync, stamp: Stamp, before: dict[str, Any], group: dist.ProcessGroup | None, sources: list[int]
) -> None:
    """Counters and controllers continue where they were, from a rank that could read them; residuals do not.

    If no rank could, controllers are as they were before, whatever part of their state a rank has loaded.
    """
    shared = [before]
    if sources:
        shared = [_shared(sync)]
        dist.broadcast_object_list(shared, group_src=sources[0], group=group)
    sync.restore_progress(step_index=stamp["step_index"], **shared[0]["progress"])
    if sync.ranks.world.rank not in sources:
        for name, part in sync.extra_state.items():
            part.load_state_dict(shared[0]["extra"][name])
    for rank_part in sync.rank_state.values():
        rank_part.forget()
    sync.forget()
