"""Residuals of all ranks. Each rank saves its own; all are restored together, or all start from zero.

A rank saves without waiting: it writes its file regardless of other ranks' files. Ranks agree on everything when a
checkpoint is loaded. A rank without its file must not continue alone then, because methods may rely on state being the
same on all ranks, and an error on a single rank would hang the others.

A checkpoint has a stamp: plain data for JSON or any framework's file, the same on all ranks:

| key | what |
|---|---|
| `run`, `step_index`, `num_skipped` | the `Moment` when it was saved |
| `world_size` | of the run that saved |
| `parameters` | names of all parameters with residuals |
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch.distributed as dist

from lowbit_strategy.checkpoint import capture, residual_files
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange, Saved
from lowbit_strategy.checkpoint.residual_files import (
    ADVICE,
    MissingResidualFile,
    Moment,
    ResidualFile,
    ResidualFileError,
)
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.engine.engine import GradientSync

OnMissingResidual = Literal["error", "reset"]
Stamp = dict[str, Any]
_KINDS = {"run": str, "step_index": int, "num_skipped": int, "world_size": int, "parameters": list}

_log = logging.getLogger("lowbit_strategy")


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


def agree(problem: Problem | None, policy: OnMissingResidual | None, group: dist.ProcessGroup | None) -> str | None:
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
) -> Stamp | str | None:
    """The stamp that all ranks have found, None if no rank has found one, or a description of what has gone wrong, for
    a warning.

    Args:
        path: The checkpoint.
        stamp: This rank's stamp, or why it cannot be read.
        policy: See `agree`.
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
    warning = agree(problem, policy, group)
    if warning is not None:
        return warning
    assert not isinstance(stamp, ResidualFileError)
    return stamp


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


def file_of(stamp: Stamp, rank: int) -> ResidualFile:
    moment = Moment(stamp["run"], stamp["step_index"], stamp["num_skipped"])
    return ResidualFile(moment, rank, stamp["world_size"])


class ResidualSaver:
    """Saves this rank's residuals when a checkpoint is written. It is made on all ranks together, but ranks save
    separately.

    Args:
        sync: The engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._last: tuple[Any, ResidualFile] | None = None  # the last save, by its path and this rank's file
        self._replaced: list[ResidualFile] = []  # this rank's earlier files of the same moment
        self._is_written = True  # whether the last save's checkpoint is written
        self._noticed = False  # whether ranks that do not save were reported
        self.begin_run()

    @property
    def last_step(self) -> int | None:
        """The step of the last save."""
        return None if self._last is None else self._last[1].moment.step

    def begin_run(self) -> None:
        """Begin a new run, on all ranks: later saves are separate from earlier ones."""
        self._run = gathered(uuid.uuid4().hex[:8], self._sync.ranks.group, "naming a run")[0]

    @contextlib.contextmanager
    def around(self, path: Any, *, asynchronous: bool) -> Iterator[Stamp]:
        """A context for writing the checkpoint `path` or, if `asynchronous`, for starting to write it.

        1. this rank writes its file next to it; if that fails, a warning says so
        2. the caller writes the checkpoint, including the stamp
        3. rank 0 deletes all files of the checkpoint that was replaced, and every rank its own of the same moment (for
           an asynchronous save, at the next save); if the checkpoint could not be written, they delete the new files
        """
        self._finish_last()
        saved: Saved = capture.capture(self._sync) | {"run": self._run}
        file = ResidualFile.of(saved)
        before = residual_files.files_of(path)
        self._notice_missing(file.moment)
        try:
            written = [residual_files.save(path, saved)]
        except ResidualFileError as error:
            _log.warning("%s", error)
            written = []
        try:
            yield {
                "run": file.moment.run,
                "step_index": file.moment.step,
                "num_skipped": file.moment.skipped,
                "world_size": file.world_size,
                "parameters": list(self._sync.specs),
            }
        except Exception:  # not an interrupt, after which the checkpoint may exist
            if file.rank == 0:
                found = residual_files.files_of(path)
                written = [each for each in found if each.is_whole and each.moment == file.moment]
            residual_files.delete(path, (each for each in written if each not in before))
            raise
        self._last, self._is_written = (path, file), False
        own = [each for each in before if each._replace(end="") == file]
        self._replaced = [each for each in own if each not in written] if written else []
        if not asynchronous:
            self._finish_last()
        if file.rank > 0 and all(each.rank > 0 for each in before):
            self._delete_own(path, file, [each for each in before if each.rank % file.world_size == file.rank])

    def _finish_last(self) -> None:
        """The last checkpoint is complete: delete what it replaces, of all ranks on rank 0, which wrote it."""
        if self._last is None or self._is_written:
            return
        self._is_written = True
        path, file = self._last
        found = residual_files.files_of(path) if file.rank == 0 else []
        residual_files.delete(path, [*self._replaced, *(each for each in found if each.moment.is_before(file.moment))])

    @staticmethod
    def _delete_own(path: Any, file: ResidualFile, before: list[ResidualFile]) -> None:
        """Delete old files on this machine, whose disk rank 0 cannot see. Keep those of the previous save, since this
        rank does not know whether rank 0 has finished the checkpoint.
        """
        kept = max((each.moment for each in before if each.moment.run == file.moment.run), default=None)
        if kept is not None and kept != file.moment:
            residual_files.delete(path, (each for each in before if each.moment.is_before(kept)))

    def _notice_missing(self, now: Moment) -> None:
        """Warn once if other ranks of this machine did not save when this one did. An exchange with them has happened
        since, except between rounds.
        """
        if self._last is None or self._noticed or self._sync.rounds is not None:
            return
        path, file = self._last
        found = {each.rank for each in residual_files.files_of(path) if each.moment == file.moment and each.is_whole}
        sizes = self._sync.ranks.topology.node_sizes
        num_near = file.world_size if sizes is None else sizes[0] if sizes else 1
        missing = [rank for rank in range(num_near) if rank not in found]
        if file.rank > 0 or 0 not in found or not missing or not file.moment.is_before(now):
            return
        self._noticed = True
        _log.warning(
            "%s has no residuals of rank %s, which did not save: a run that resumes from it starts with residuals of"
            " zero on all ranks. Call accelerator.save_state, session.save and similar methods on all ranks, not only"
            " on the main process",
            path,
            ", ".join(map(str, missing)),
        )


def resume(
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
        on_world_size_change: See `capture.restore`.
        on_missing_residual: The policy for missing or unusable files; see `agree`.

    Raises:
        ResidualFileError: On every rank, if files of any rank are unusable and required.
        ValueError: On every rank, if the residuals belong to a different model.
    """
    before = copy.deepcopy(_shared(sync))
    problem = _restore(sync, path, stamp, on_world_size_change)
    if (warning := agree(problem, on_missing_residual, sync.ranks.group)) is None:
        return
    if sync.ranks.logs:
        _log.warning("%s; continuing with residuals of zero on all ranks", warning)
    _start_from_zero(sync, stamp, before, can_read=problem is None)


def _restore(sync: GradientSync, path: Any, stamp: Stamp, policy: OnWorldSizeChange) -> Problem | None:
    """Restore. Return a description of what has gone wrong, if anything."""
    rank_then = sync.ranks.everyone.rank % stamp["world_size"]

    def load_rank(rank: int) -> Saved:
        return residual_files.load(path, file_of(stamp, rank))

    try:
        saved = capture.saved_by_own(sync, stamp["world_size"], load_rank)
        capture.restore(sync, saved, load_rank=load_rank, on_world_size_change=policy)
    except (ResidualFileError, ValueError) as error:
        return Problem.of(error)
    except Exception as error:  # a file with a different structure can fail in any way
        name, cause = residual_files.path_of(path, file_of(stamp, rank_then)), f"{type(error).__name__}: {error}"
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
