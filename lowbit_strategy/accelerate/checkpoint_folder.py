"""Residuals inside a checkpoint's folder, so that what copies, rotates or removes the folder takes them along.

``<folder>/residuals.lowbit/`` has one file a rank and ``stamp.json``, which says which of them belong to the
checkpoint; a second prepared model has ``residuals_1.lowbit``, and so on.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from lowbit_strategy.checkpoint import residual_files
from lowbit_strategy.hooks.attach import Attached

_STAMP = "stamp.json"
Stamp = dict[str, Any]

_log = logging.getLogger("lowbit_strategy")


def save(folder: str, attachments: Sequence[Attached], *, barrier: Callable[[], None], writes_stamp: bool) -> None:
    """Write this rank's files into `folder`; call on all ranks.

    Args:
        folder: Of the checkpoint.
        attachments: One a prepared model.
        barrier: Waits for all ranks.
        writes_stamp: On one rank of each machine: machines may not share a file system.
    """
    saved = [attached.save(_path(folder, index)) for index, attached in enumerate(attachments)]
    barrier()  # no stamp without all files it speaks of
    if writes_stamp:
        for index, attached in enumerate(attachments):
            _write(_path(folder, index), attached.stamp())
    barrier()
    for index, state in enumerate(saved):
        residual_files.remove_stale(_path(folder, index), state)


def load(folder: str, attachments: Sequence[Attached], *, compressed: bool = False) -> None:
    """Restore what `save` wrote.

    Args:
        folder: Of the checkpoint.
        attachments: As when it was saved.
        compressed: The checkpoint is known to be of a compressed run: without residuals it is incomplete.

    Raises:
        ResidualFileError: Files are missing or damaged, and ``on_missing_residual="error"``.
        ValueError: The residuals are of another model.
    """
    for index, attached in enumerate(attachments):
        path = _path(folder, index)
        stamp = _read(path)
        if stamp is None and compressed:
            _incomplete(path, attached)
        else:
            attached.load(path, stamp)


def _incomplete(path: str, attached: Attached) -> None:
    text = f"the run that saved {path} was compressed, but its residuals are not there (was it stopped while saving?)"
    if attached.options.on_missing_residual == "error":
        advice = 'take an earlier checkpoint, or pass on_missing_residual="reset" to go on with residuals of zero'
        raise residual_files.ResidualFileError(f"{text}: {advice}")
    _log.warning("%s; going on with residuals of zero", text)


def _path(folder: str, index: int) -> str:
    return os.path.join(folder, "residuals" if index == 0 else f"residuals_{index}")


def _write(path: str, stamp: Stamp) -> None:
    target = os.path.join(residual_files.sidecar_folder(path), _STAMP)
    partial = f"{target}.{os.getpid()}.part"
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(stamp, file)
    os.replace(partial, target)


def _read(path: str) -> Stamp | None:
    try:
        with open(os.path.join(residual_files.sidecar_folder(path), _STAMP), encoding="utf-8") as file:
            stamp: Stamp = json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise residual_files.ResidualFileError(
            f"{file.name} cannot be read ({error}): remove it to start from zero"
        ) from error
    return stamp
