"""Stores residuals inside a checkpoint's folder, so that they are copied, rotated or removed with it.

``<folder>/residuals.lowbit/`` has one file per rank, and ``stamp.json``, which lists the files that belong to the
checkpoint. A second prepared model has ``residuals_1.lowbit``, and so on.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from lowbit_strategy.attach.session import Session
from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.checkpoint.residual_files import MissingResidualFile, ResidualFileError, Stamp

_log = logging.getLogger("lowbit_strategy")


@contextlib.contextmanager
def save(folder: str, sessions: Sequence[Session], *, writes_stamp: bool) -> Iterator[None]:
    """A context for writing the checkpoint `folder`, which puts this rank's residuals into it, and finally the stamp.

    Args:
        folder: Folder of the checkpoint.
        sessions: One per prepared model.
        writes_stamp: Whether this rank writes the stamp. One rank of each machine does, since machines may not share a
            file system.
    """
    with contextlib.ExitStack() as saving:
        paths = [_path(folder, index) for index in range(len(sessions))]
        stamps = [saving.enter_context(each.save(path)) for path, each in zip(paths, sessions, strict=True)]
        yield
        if writes_stamp:
            for path, stamp in zip(paths, stamps, strict=True):
                _write(_stamp_file(path), stamp)


def load(folder: str, sessions: Sequence[Session], *, compressed: bool = False) -> None:
    """Restore what `save` wrote.

    Args:
        folder: Folder of the checkpoint.
        sessions: The same as when it was saved.
        compressed: Whether the checkpoint is known to come from a compressed run, so that it is incomplete without
            residuals.

    Raises:
        ResidualFileError: Files are missing or damaged, and ``on_missing_residual="error"``.
        ValueError: The residuals belong to a different model.
    """
    for index, session in enumerate(sessions):
        path = _path(folder, index)
        stamp = _read(_stamp_file(path))
        if stamp is None and compressed:
            stamp = MissingResidualFile(
                f"the run that saved {path} was compressed, but its residuals are missing (was it stopped while"
                ' saving?): use an earlier checkpoint, or pass on_missing_residual="reset" to continue with residuals'
                " of zero"
            )
        session.load(path, stamp)


def _path(folder: str, index: int) -> str:
    return os.path.join(folder, "residuals" if index == 0 else f"residuals_{index}")


def _stamp_file(path: str) -> str:
    return os.path.join(residual_files.sidecar_folder(path), "stamp.json")


def _write(target: str, stamp: Stamp) -> None:
    partial = f"{target}.{uuid.uuid4().hex}.part"
    try:
        with open(partial, "w", encoding="utf-8") as file:
            json.dump(stamp, file)
        os.replace(partial, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.remove(partial)
        _log.warning(
            "%s cannot be written (%s): a run that resumes from this checkpoint starts with residuals of zero. Free"
            " some space or give a different folder",
            target,
            error,
        )


def _read(name: str) -> Stamp | ResidualFileError | None:
    """The stamp, None if missing, or the error if unreadable."""
    try:
        with open(name, encoding="utf-8") as file:
            stamp: Any = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return ResidualFileError(
            f'{name} cannot be read ({error}): restore it, or pass on_missing_residual="reset" to continue with'
            " residuals of zero"
        )
    return {} if stamp is None else stamp
