"""Saving residuals on all ranks together: either every rank's file is there, or no checkpoint is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.stamp import Stamp, first_problem, gather
from lowbit_strategy.engine.engine import GradientSync


@dataclass(frozen=True, slots=True)
class SavedResiduals:
    """What `save_residuals` has written.

    Args:
        stamp: Goes into the checkpoint.
        replaced: This rank's files of a checkpoint that the new one replaces.
    """

    stamp: Stamp
    replaced: tuple[str, ...]

    def remove_replaced(self) -> None:
        """Call when the new checkpoint is complete: until then the old one still needs them."""
        residual_files.delete(self.replaced)


def save_residuals(sync: GradientSync, path: Any, *, group: dist.ProcessGroup | None = None) -> SavedResiduals:
    """Write this rank's file beside the checkpoint `path`; call on all ranks, *before* the checkpoint is written.

    When it returns, all ranks have written theirs.

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
        "world_size": sync.ranks.world_size,
        "parameters": list(sync.specs),
        "checksums": [text for text, _ in outcomes],
    }
    return SavedResiduals(stamp, tuple(name for name in before if name not in written))
