"""Restoring residuals on all ranks together: either every rank gets its own back, or all start from zero.

A rank whose file is missing must not go its own way: methods may rely on parts of their state being the same on all
ranks, and an error on one rank alone would leave the others waiting.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from lowbit_strategy.checkpoint import capture, residual_files
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange, Saved
from lowbit_strategy.engine.engine import GradientSync

OnMissingResidual = Literal["error", "reset"]
Stamp = dict[str, Any]  # step_index, world_size, parameters: what a checkpoint says of the files beside it

_log = logging.getLogger("lowbit_strategy")


class _Shared(NamedTuple):
    """What is the same on all ranks and so can be had from any of them."""

    num_skipped: int
    loss_scale: float | None
    extra: dict[str, Any]


def resume(
    sync: GradientSync,
    path: Any,
    stamp: Stamp,
    *,
    on_world_size_change: OnWorldSizeChange,
    on_missing_residual: OnMissingResidual,
) -> None:
    """Put back what was saved beside the checkpoint `path`; call on all ranks.

    Raises:
        ResidualFileError: On every rank, if a file of any rank is missing or damaged.
        ValueError: On every rank, if the residuals are of another model.
    """
    problem = _restore(sync, path, stamp, on_world_size_change)
    problems = _gather(sync, None if problem is None else str(problem))
    failed = [rank for rank, text in enumerate(problems) if text is not None]
    if not failed:
        return
    message = f"rank {failed[0]}: {problems[failed[0]]}"
    if on_missing_residual == "error":
        kind = ValueError if isinstance(problem, ValueError) else residual_files.ResidualFileError
        raise kind(message) from problem
    if sync.comm.rank == 0:
        _log.warning("%s; going on with residuals of zero on all ranks", message)
    _start_from_zero(sync, stamp, [rank for rank, text in enumerate(problems) if text is None])


def _restore(sync: GradientSync, path: Any, stamp: Stamp, policy: OnWorldSizeChange) -> Exception | None:
    old_world = stamp["world_size"]

    def load_rank(rank: int) -> Saved:
        return residual_files.load(path, stamp["step_index"], rank, old_world)

    try:
        capture.restore(sync, load_rank(sync.comm.rank % old_world), load_rank=load_rank, on_world_size_change=policy)
    except (residual_files.ResidualFileError, ValueError) as error:
        return error
    return None


def _gather(sync: GradientSync, mine: str | None) -> list[str | None]:
    everyone: list[str | None] = [None] * sync.comm.world_size
    dist.all_gather_object(everyone, mine, group=sync.comm.group)
    return everyone


def _start_from_zero(sync: GradientSync, stamp: Stamp, sources: list[int]) -> None:
    """Counters and controllers go on where they were, from a rank that could read them; residuals do not."""
    shared = [_Shared(sync.num_skipped, sync.loss_scale, {k: v.state_dict() for k, v in sync.extra_state.items()})]
    if sources:
        dist.broadcast_object_list(shared, group_src=sources[0], group=sync.comm.group)
    sync.step_index = stamp["step_index"]
    sync.num_skipped, sync.loss_scale = shared[0].num_skipped, shared[0].loss_scale
    sync.follow_phase()
    if sync.comm.rank not in sources:
        for name, part in sync.extra_state.items():
            part.load_state_dict(shared[0].extra[name])
    sync.forget()
