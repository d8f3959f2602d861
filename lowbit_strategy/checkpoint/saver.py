"""Saves residuals with a checkpoint. A rank writes its file without waiting, regardless of other ranks' files: they
agree on everything when the checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterator
from typing import Any

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.capture import Saved, capture
from lowbit_strategy.checkpoint.residual_files import ResidualFile, ResidualFileError, SavePoint, Stamp
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.engine.engine import GradientSync

_log = logging.getLogger("lowbit_strategy")


class ResidualSaver:
    """Saves this rank's residuals when a checkpoint is written. It is made on all ranks together, but ranks save
    separately.

    Args:
        sync: The engine.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self._last: tuple[Any, ResidualFile] | None = None  # the last save, by its path and this rank's file
        self._replaced: list[ResidualFile] = []  # this rank's earlier files of the same save point
        self._is_written = True  # whether the last save's checkpoint is written
        self._noticed = False  # whether ranks that do not save were reported
        self.begin_run()

    @property
    def last_step(self) -> int | None:
        """The step of the last save."""
        return None if self._last is None else self._last[1].saved_at.step

    def begin_run(self) -> None:
        """Begin a new run, on all ranks: later saves are separate from earlier ones."""
        self._run = gathered(uuid.uuid4().hex[:8], self._sync.ranks.group, "naming a run")[0]

    @contextlib.contextmanager
    def around(self, path: Any, *, asynchronous: bool) -> Iterator[Stamp]:
        """A context for writing the checkpoint `path` or, if `asynchronous`, for starting to write it.

        1. this rank writes its file next to it; if that fails, a warning says so
        2. the caller writes the checkpoint, including the stamp
        3. rank 0 deletes all files of the checkpoint that was replaced, and every rank its own of the same save point
           (for an asynchronous save, at the next save); if the checkpoint could not be written, they delete the new
           files
        """
        self._finish_last()
        saved: Saved = capture(self._sync) | {"run": self._run}
        file = ResidualFile.of(saved)
        before = residual_files.files_of(path)
        self._notice_missing(file.saved_at)
        try:
            written = [residual_files.save(path, saved)]
        except ResidualFileError as error:
            _log.warning("%s", error)
            written = []
        try:
            yield {
                "run": file.saved_at.run,
                "step_index": file.saved_at.step,
                "num_skipped": file.saved_at.skipped,
                "world_size": file.world_size,
                "parameters": list(self._sync.specs),
            }
        except Exception:  # not an interrupt, after which the checkpoint may exist
            if file.rank == 0:
                found = residual_files.files_of(path)
                written = [each for each in found if each.is_whole and each.saved_at == file.saved_at]
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
        residual_files.delete(
            path, [*self._replaced, *(each for each in found if each.saved_at.is_before(file.saved_at))]
        )

    @staticmethod
    def _delete_own(path: Any, file: ResidualFile, before: list[ResidualFile]) -> None:
        """Delete old files on this machine, whose disk rank 0 cannot see. Keep those of the previous save, since this
        rank does not know whether rank 0 has finished the checkpoint.
        """
        kept = max((each.saved_at for each in before if each.saved_at.run == file.saved_at.run), default=None)
        if kept is not None and kept != file.saved_at:
            residual_files.delete(path, (each for each in before if each.saved_at.is_before(kept)))

    def _notice_missing(self, now: SavePoint) -> None:
        """Warn once if other ranks of this machine did not save when this one did. An exchange with them has happened
        since, except between rounds.
        """
        if self._last is None or self._noticed or self._sync.rounds is not None:
            return
        path, file = self._last
        found = {
            each.rank for each in residual_files.files_of(path) if each.saved_at == file.saved_at and each.is_whole
        }
        sizes = self._sync.ranks.topology.node_sizes
        num_near = file.world_size if sizes is None else sizes[0] if sizes else 1
        missing = [rank for rank in range(num_near) if rank not in found]
        if file.rank > 0 or 0 not in found or not missing or not file.saved_at.is_before(now):
            return
        self._noticed = True
        _log.warning(
            "%s has no residuals of rank %s, which did not save: a run that resumes from it starts with residuals of"
            " zero on all ranks. Call accelerator.save_state, session.save and similar methods on all ranks, not only"
            " on the main process",
            path,
            ", ".join(map(str, missing)),
        )
