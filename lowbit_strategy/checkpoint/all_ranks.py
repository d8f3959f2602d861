"""Residuals of all ranks, saved and restored together: each rank gets its own back, or all start from zero.

A rank without its file must not continue on its own: methods may rely on parts of their state being the same on all
ranks, and an error on one rank alone would hang the others. A checkpoint has a stamp, plain data that fits into JSON
and any framework's file:

| key | what |
|---|---|
| `step_index`, `world_size` | of the run that saved |
| `parameters` | names of all parameters with residuals |
| `checksums` | of every rank's file, in rank order |
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import torch.distributed as dist

from lowbit_strategy.checkpoint import capture, residual_files
from lowbit_strategy.checkpoint.capture import OnWorldSizeChange, Saved
from lowbit_strategy.checkpoint.residual_files import ADVICE, ResidualFile, ResidualFileError
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.engine.engine import GradientSync

OnMissingResidual = Literal["error", "reset"]
Stamp = dict[str, Any]
_KINDS = {"step_index": int, "world_size": int, "parameters": list, "checksums": list}

_log = logging.getLogger("lowbit_strategy")


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, in rank order."""
    return gathered(value, group, "agreeing on a checkpoint's residual files")


def all_succeed(value: Any, problem: str | None, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, in rank order.

    Raises:
        ResidualFileError: On every rank, if one of them has a problem.
    """
    outcomes = gather((value, problem), group)
    if (message := _first([text for _, text in outcomes])) is not None:
        raise ResidualFileError(message)
    return [each for each, _ in outcomes]


def _first(problems: list[str | None]) -> str | None:
    return next((f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None), None)


def file_of(stamp: Stamp, rank: int) -> ResidualFile:
    return ResidualFile(stamp["step_index"], rank, stamp["world_size"], stamp["checksums"][rank])


def agree_on_stamp(path: Any, stamp: Stamp | ResidualFileError | None, group: dist.ProcessGroup | None) -> Stamp | None:
    """The stamp that all ranks have found; None if none has.

    Args:
        path: The checkpoint.
        stamp: This rank's, or why it cannot be read.
        group: All ranks.

    Raises:
        ResidualFileError: On every rank, if a rank has another stamp than rank 0, or one that cannot be used.
    """
    found = str(stamp) if isinstance(stamp, ResidualFileError) else _problem(path, stamp)
    texts = all_succeed(json.dumps(stamp, sort_keys=True, default=str), found, group)
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise ResidualFileError(
            f"rank {other} finds another record of residuals in {path} than rank 0: the checkpoint must be the same on"
            f" all machines; {ADVICE}"
        )
    assert not isinstance(stamp, ResidualFileError)
    return stamp


def _problem(path: Any, stamp: Any) -> str | None:
    """Why a stamp cannot be used."""
    if stamp is None:
        return None
    if not isinstance(stamp, dict):
        return f"what {path} records of its residual files cannot be read (it is a {type(stamp).__name__}): {ADVICE}"
    if lacking := [key for key, kind in _KINDS.items() if not isinstance(stamp.get(key), kind)]:
        return (
            f"{path} records no {lacking[0]} of its residual files: another version of this package wrote it. Load it"
            f" with that version; otherwise {ADVICE}"
        )
    if stamp["world_size"] < 1 or stamp["step_index"] < 0:
        return (
            f"{path} records residual files of {stamp['world_size']} ranks at step {stamp['step_index']}, which no run"
            f" has saved: {ADVICE}"
        )
    if len(stamp["checksums"]) != stamp["world_size"]:
        return f"{path} records {len(stamp['checksums'])} residual files for {stamp['world_size']} ranks: {ADVICE}"
    return None


class ResidualSaver:
    """Saves residuals around the writing of checkpoints, on all ranks together.

    Args:
        sync: The engine.
        group: Group of all ranks.
    """

    def __init__(self, sync: GradientSync, group: dist.ProcessGroup | None) -> None:
        self._sync, self._group = sync, group
        self._replaced: list[str] | None = None  # files, by a checkpoint that is being written

    @contextlib.contextmanager
    def around(self, path: Any, *, asynchronous: bool) -> Iterator[Stamp]:
        """Around writing the checkpoint `path`, or if `asynchronous`, around the start of it; call it on all ranks.

        1. every rank writes its file beside it, and all learn of the others'
        2. the caller writes the checkpoint, with the stamp that it gets
        3. once it is complete, files of a checkpoint that it replaces are deleted

        Raises:
            ResidualFileError: On every rank, if one of them cannot write its file. No rank leaves a new file behind.
        """
        if self._replaced is not None:
            gather(None, self._group)  # all ranks have arrived here, so the earlier checkpoint is complete
            residual_files.delete(self._replaced)
            self._replaced = None
        stamp, replaced = self._save(path)
        yield stamp
        gather(None, self._group)
        if asynchronous:
            self._replaced = replaced
        else:
            residual_files.delete(replaced)

    def _save(self, path: Any) -> tuple[Stamp, list[str]]:
        """The stamp, and this rank's files of a checkpoint that is replaced."""
        saved = capture.capture(self._sync)
        before: list[str] = []
        written: list[str] = []
        checksum = problem = None
        try:
            before = residual_files.files_of(path, saved["rank"], saved["world_size"])
            entry = residual_files.save(path, saved)
            checksum, written = entry.checksum, [residual_files.path_of(path, entry)]
        except Exception as error:
            problem = str(error) or type(error).__name__
        try:
            checksums = all_succeed(checksum, problem, self._group)
        except ResidualFileError:
            residual_files.delete(name for name in written if name not in before)
            raise
        stamp = {"step_index": saved["step_index"], "world_size": saved["world_size"], "checksums": checksums}
        return stamp | {"parameters": list(self._sync.specs)}, [name for name in before if name not in written]


def resume(
    sync: GradientSync,
    path: Any,
    stamp: Stamp,
    *,
    group: dist.ProcessGroup | None = None,
    on_world_size_change: OnWorldSizeChange,
    on_missing_residual: OnMissingResidual,
) -> None:
    """Restore what was saved beside the checkpoint `path`; call on all ranks, with the same stamp.

    Args:
        sync: The engine of the model that was saved.
        path: The checkpoint.
        stamp: The checkpoint's.
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
    if (message := _first(problems)) is None:
        return
    if on_missing_residual == "error":
        of_another_model = next(outcome[0] for outcome in outcomes if outcome is not None)
        raise (ValueError if of_another_model else ResidualFileError)(message) from error
    if sync.ranks.logs:
        _log.warning("%s; continuing with residuals of zero on all ranks", message)
    _start_from_zero(sync, stamp, before, group, [rank for rank, text in enumerate(problems) if text is None])


def _restore(sync: GradientSync, path: Any, stamp: Stamp, policy: OnWorldSizeChange) -> Exception | None:
    """The error, if any: a `ValueError` if the files are intact, but of another model."""
    rank_then = sync.ranks.world.rank % stamp["world_size"]

    def load_rank(rank: int) -> Saved:
        return residual_files.load(path, file_of(stamp, rank))

    try:
        capture.restore(sync, load_rank(rank_then), load_rank=load_rank, on_world_size_change=policy)
    except (ResidualFileError, ValueError) as error:
        return error
    except Exception as error:  # a file of another structure fails in any way
        name, cause = residual_files.path_of(path, file_of(stamp, rank_then)), f"{type(error).__name__}: {error}"
        wrapped = ResidualFileError(f"the checkpoint's residual file {name} cannot be restored ({cause}): {ADVICE}")
        wrapped.__cause__ = error
        return wrapped
    return None


def _shared(sync: GradientSync) -> dict[str, Any]:
    """What is the same on all ranks."""
    progress = {"num_skipped": sync.num_skipped, "loss_scale": sync.loss_scale}
    return {"progress": progress, "extra": {name: part.state_dict() for name, part in sync.extra_state.items()}}


def _start_from_zero(
    sync: GradientSync, stamp: Stamp, before: dict[str, Any], group: dist.ProcessGroup | None, sources: list[int]
) -> None:
    """Counters and controllers continue, from the first of the ranks `sources` that could read them; residuals do not.
    Without such a rank, controllers are as before.
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
