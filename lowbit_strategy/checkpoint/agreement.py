"""The agreement of ranks when a checkpoint is loaded: its stamp, and what to do if some of them cannot restore."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from lowbit_strategy.checkpoint.residual_files import ADVICE, MissingResidualFile, ResidualFileError, Stamp
from lowbit_strategy.collectives.comm import gathered

OnMissingResidual = Literal["error", "reset"]
_KINDS = {"run": str, "step_index": int, "num_skipped": int, "world_size": int, "parameters": list}


class Problem(NamedTuple):
    """Why a rank cannot restore its residuals.

    Args:
        text: The message for the user.
        kind: ``missing``: there is no file; ``unusable``: it is damaged or the wrong file; ``model``: it belongs to a
            different model.
    """

    text: str
    kind: Literal["missing", "unusable", "model"]

    @classmethod
    def of(cls, error: Exception) -> Problem:
        if isinstance(error, MissingResidualFile):
            return cls(str(error), "missing")
        return cls(str(error), "unusable" if isinstance(error, ResidualFileError) else "model")


def agree_on_problem(
    problem: Problem | None, policy: OnMissingResidual | None, group: dist.ProcessGroup | None
) -> str | None:
    """A description of what has gone wrong on any rank, for a warning; None if nothing has. Call it on all ranks.

    Args:
        problem: This rank's problem.
        policy: ``error``: accept no problem; ``reset``: accept any problem; None: accept missing files only.
        group: All ranks.

    Raises:
        ResidualFileError: On every rank, if any rank has a problem that is not accepted.
        ValueError: On every rank, if the residuals belong to a different model.
    """
    problems = gathered(problem, group, "agreeing on a checkpoint's residual files")
    found = {rank: each for rank, each in enumerate(problems) if each is not None}
    for rank, (text, kind) in found.items():
        if policy == "error" or (policy is None and kind != "missing"):
            raise (ValueError if kind == "model" else ResidualFileError)(f"rank {rank}: {text}")
    if not found:
        return None
    rank, (text, kind) = next(iter(found.items()))
    if kind != "missing":
        return f"rank {rank}: {text}"
    ranks = ", ".join(map(str, found))
    return (
        f"rank {ranks}: {text.removesuffix(f': {ADVICE}')}. It was lost, or the checkpoint was saved without this rank:"
        " accelerator.save_state, session.save and similar methods save residuals only of the ranks that call them, so"
        " call them on all ranks"
    )


def agree_on_stamp(
    path: Any,
    stamp: Stamp | ResidualFileError | None,
    policy: OnMissingResidual | None,
    group: dist.ProcessGroup | None,
) -> tuple[Stamp | None, str | None]:
    """The stamp that all ranks have found, None if no rank has found one; and a description of what has gone wrong, for
    a warning, None if nothing has.

    Args:
        path: The checkpoint.
        stamp: This rank's stamp, or why it cannot be read.
        policy: See `agree_on_problem`.
        group: All ranks.

    Raises:
        ResidualFileError: On every rank, if a rank's stamp differs from rank 0's or cannot be used.
    """
    problem = Problem.of(stamp) if isinstance(stamp, ResidualFileError) else _problem(path, stamp)
    own = None if problem is not None else json.dumps(stamp, sort_keys=True)
    first, *_ = gathered(own, group, "agreeing on a checkpoint's residual files")
    if None not in (own, first) and own != first:
        text = (
            f"this rank and rank 0 find different records of residuals in {path}: the checkpoint must be the same on"
            f" all machines; {ADVICE}"
        )
        problem = Problem(text, "unusable")
    warning = agree_on_problem(problem, policy, group)
    return (None, warning) if warning is not None or isinstance(stamp, ResidualFileError) else (stamp, None)


def _problem(path: Any, stamp: Any) -> Problem | None:
    """Why a stamp cannot be used."""
    if stamp is None:
        return None
    text = None
    if not isinstance(stamp, dict):
        text = f"the record of residual files in {path} cannot be read (it is a {type(stamp).__name__}): {ADVICE}"
    elif lacking := [key for key, kind in _KINDS.items() if not isinstance(stamp.get(key), kind)]:
        text = (
            f"{path} records no {lacking[0]} of its residual files: a different version of this package wrote it. Load"
            f" it with that version; otherwise {ADVICE}"
        )
    elif stamp["world_size"] < 1 or stamp["step_index"] < 0:
        text = (
            f"{path} records residual files of {stamp['world_size']} ranks at step {stamp['step_index']}, which no run"
            f" has saved: {ADVICE}"
        )
    return None if text is None else Problem(text, "unusable")
