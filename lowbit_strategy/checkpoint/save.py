"""Saving residuals on all ranks together: either every rank's file is there, or no checkpoint is written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.stamp import Stamp, first_problem, gather
from lowbit_strategy.engine.engine import GradientSync


def save_residuals(sync: GradientSync, path: Any, *, group: dist.ProcessGroup | None) -> tuple[Stamp, list[str]]:
    """Write this rank's file beside the checkpoint `path`; call on all ranks, *before* the checkpoint is written.

    When it returns, all ranks have written theirs.

    Returns:
        The stamp that goes into the checkpoint, and this rank's files of a checkpoint that the new one replaces: to be
        deleted when that is complete, because until then the old one still needs them.

    Raises:
        ResidualFileError: On every rank, if one of them cannot write its file. None leaves a new file behind.
    """
    saved = capture(sync)
    before: list[str] = []
    written: list[str] = []
    checksum = problem = None
    try:
        before = residual_files.files_of(path, saved["rank"], saved["world_size"])
        place = residual_files.save(path, saved)
        checksum, written = place.checksum, [residual_files.path_of(path, place)]
    except Exception as error:
        problem = str(error) or type(error).__name__
    outcomes = gather((checksum, problem), group)
    if (message := first_problem([text for _, text in outcomes])) is not None:
        residual_files.delete(name for name in written if name not in before)
        raise residual_files.ResidualFileError(message)
    stamp = {
        "step_index": sync.step_index,
        "world_size": sync.ranks.world.world_size,
        "parameters": list(sync.specs),
        "checksums": [text for text, _ in outcomes],
    }
    return stamp, [name for name in before if name not in written]


class ResidualSaver:
    """Saves residuals around the writing of checkpoints, on all ranks together.

    Args:
        sync: The engine.
        group: Of all ranks.
    """

    def __init__(self, sync: GradientSync, group: dist.ProcessGroup | None) -> None:
        self._sync, self._group = sync, group
        self._replaced: list[str] | None = None  # files, by a checkpoint that was begun to be written

    @contextlib.contextmanager
    def around(self, path: Any, *, asynchronous: bool) -> Iterator[Stamp]:
        """Around the writing of the checkpoint `path`, or, if `asynchronous`, around the beginning of it.

        Raises:
            ResidualFileError: On every rank, before anything is replaced, if one of them cannot write its file.
        """
        if self._replaced is not None:
            gather(None, self._group)  # all ranks have come here, so what replaced them is complete
            residual_files.delete(self._replaced)
            self._replaced = None
        stamp, replaced = save_residuals(self._sync, path, group=self._group)
        yield stamp
        gather(None, self._group)
        if asynchronous:
            self._replaced = replaced
        else:
            residual_files.delete(replaced)
