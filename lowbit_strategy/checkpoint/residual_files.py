"""Per-rank files beside a checkpoint: ``<checkpoint>.lowbit/step-<step>-rank-<rank>-of-<world>.pt``.

Files carry the step in their name: those of a new checkpoint are written before the checkpoint itself, those of the
one it replaces are removed after. Whenever a process dies, every checkpoint on disk still has its residuals.
"""

from __future__ import annotations

import contextlib
import posixpath
import uuid
from typing import Any

import fsspec
import torch

from lowbit_strategy.checkpoint.capture import Saved

SUFFIX = ".lowbit"


class ResidualFileError(RuntimeError):
    """A residual file that a checkpoint names is missing or cannot be read."""


def sidecar_folder(checkpoint_path: Any) -> str:
    return str(checkpoint_path).rstrip("/") + SUFFIX


def _file(checkpoint_path: Any, step: int, rank: int, world_size: int) -> str:
    return posixpath.join(sidecar_folder(checkpoint_path), f"step-{step}-rank-{rank}-of-{world_size}.pt")


def save(checkpoint_path: Any, saved: Saved) -> None:
    """Write this rank's file: complete under its name or not there at all."""
    path = _file(checkpoint_path, saved["step_index"], saved["rank"], saved["world_size"])
    fs, local = fsspec.core.url_to_fs(path)
    fs.makedirs(posixpath.dirname(local), exist_ok=True)
    partial = f"{local}.{uuid.uuid4().hex}.part"
    with fs.open(partial, "wb") as file:
        torch.save(saved, file)
    fs.mv(partial, local)


def remove_stale(checkpoint_path: Any, saved: Saved) -> None:
    """Remove what this rank wrote for a checkpoint that has been replaced."""
    rank, keep = saved["rank"], _file(checkpoint_path, saved["step_index"], saved["rank"], saved["world_size"])
    fs, folder = fsspec.core.url_to_fs(sidecar_folder(checkpoint_path))
    keep = posixpath.basename(keep)
    for path in fs.glob(posixpath.join(folder, f"step-*-rank-{rank}-of-*")):
        if posixpath.basename(path) != keep:
            fs.rm(path)


def load(checkpoint_path: Any, step: int, rank: int, world_size: int) -> Saved:
    """Read the file of `rank` of the run that saved.

    Raises:
        ResidualFileError: It is missing, truncated or not a residual file.
    """
    path = _file(_resolve_link(checkpoint_path), step, rank, world_size)
    advice = (
        'restore the file, or pass on_missing_residual="reset" to the strategy to go on with residuals of zero'
        " (the checkpoint itself is not affected)"
    )
    fs, local = fsspec.core.url_to_fs(path)
    if not fs.exists(local):
        raise ResidualFileError(f"the checkpoint's residual file {path} is missing: {advice}")
    try:
        with fs.open(local, "rb") as file:
            saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes fail in any of the ways of pickle
        raise ResidualFileError(f"the checkpoint's residual file {path} cannot be read ({error}): {advice}") from error
    if not isinstance(saved, dict) or "parameters" not in saved:
        raise ResidualFileError(f"{path} is not a residual file: {advice}")
    return saved


def _resolve_link(checkpoint_path: Any) -> str:
    """``last.ckpt`` may be a link: the files lie beside what it points to."""
    fs, local = fsspec.core.url_to_fs(str(checkpoint_path))
    if fs.exists(sidecar_folder(local)) or "file" not in fs.protocol:
        return str(checkpoint_path)
    import os

    return os.path.realpath(local)


def remove(checkpoint_path: Any, rank: int) -> None:
    """Remove this rank's files, and the folder once it is empty."""
    fs, folder = fsspec.core.url_to_fs(sidecar_folder(checkpoint_path))
    if not fs.exists(folder):
        return
    for path in fs.glob(posixpath.join(folder, f"step-*-rank-{rank}-of-*")):
        fs.rm(path)
    with contextlib.suppress(FileNotFoundError):  # another rank may be doing the same
        if not fs.ls(folder, detail=False):
            fs.rmdir(folder)
