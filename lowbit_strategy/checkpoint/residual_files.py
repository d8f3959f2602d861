"""Files beside a checkpoint: ``<checkpoint>.lowbit/step-<step>-rank-<rank>-of-<world>-<checksum>.pt``, one per rank.

A file's name has the checksum of its bytes, and the checkpoint's stamp lists the checksums of all ranks' files. So two
different files never share a name: those of a new checkpoint are written before the checkpoint itself, those of the one
it replaces are removed after it, and no matter when a process dies, every checkpoint on disk has its residuals. Damaged
or swapped files are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
import uuid
from collections.abc import Iterable
from typing import IO, Any, NamedTuple

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.utils._pytree import tree_flatten_with_path

from lowbit_strategy.checkpoint.capture import Saved

SUFFIX = ".lowbit"
ADVICE = (
    'restore the file, or pass on_missing_residual="reset" to continue with residuals of zero'
    " (the checkpoint itself is not affected)"
)
_NAME = re.compile(r"step-\d+-rank-(?P<rank>\d+)-of-\d+-[0-9a-f]+\.pt")
_PARTIAL = re.compile(r"rank-(?P<rank>\d+)\.[0-9a-f]+\.part")
_CHUNK = 1 << 20


class ResidualFileError(RuntimeError):
    """A residual file cannot be written, or one that a checkpoint names is missing, damaged or another one."""


class ResidualFile(NamedTuple):
    """A file by the optimizer step, rank and world size that saved it, and the checksum of its bytes."""

    step: int
    rank: int
    world_size: int
    checksum: str

    @property
    def name(self) -> str:
        return f"step-{self.step}-rank-{self.rank}-of-{self.world_size}-{self.checksum}.pt"


def sidecar_folder(checkpoint_path: Any) -> str:
    return str(checkpoint_path).rstrip("/") + SUFFIX


def path_of(checkpoint_path: Any, entry: ResidualFile) -> str:
    return posixpath.join(sidecar_folder(checkpoint_path), entry.name)


class _Hashing:
    """A writable file that computes the checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def checksum(self) -> str:
        return _short(self._hash)


def _short(digest: Any) -> str:
    text: str = digest.hexdigest()
    return text[:16]


def _checksum(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return _short(digest)


def save(checkpoint_path: Any, saved: Saved) -> ResidualFile:
    """Write this rank's file, atomically.

    Raises:
        ResidualFileError: It cannot be written (a full disk, for example). Nothing is left behind.
    """
    folder = sidecar_folder(checkpoint_path)
    fs, local = fsspec.core.url_to_fs(folder)
    partial = posixpath.join(local, f"rank-{saved['rank']}.{uuid.uuid4().hex}.part")
    try:
        fs.makedirs(local, exist_ok=True)
        with fs.open(partial, "wb") as raw:
            file = _Hashing(raw)
            torch.save(saved, file)  # type: ignore[arg-type]  # it only writes and flushes
        entry = ResidualFile(saved["step_index"], saved["rank"], saved["world_size"], file.checksum)
        _move(fs, partial, posixpath.join(local, entry.name))
    except BaseException as error:
        with contextlib.suppress(Exception):
            fs.rm_file(partial)
        if not isinstance(error, Exception):
            raise
        cause = f"{type(error).__name__}: {_innermost(error)}"
        raise ResidualFileError(
            f"the residuals of rank {saved['rank']} cannot be written to {folder} ({cause}): make room or give another"
            " folder; the checkpoint was not written either"
        ) from error
    return entry


def _innermost(error: BaseException) -> BaseException:
    """The first error: torch's writer fails again when it is closed."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _move(fs: Any, source: str, target: str) -> None:
    if isinstance(fs, LocalFileSystem):
        os.replace(source, target)
    else:  # not fs.mv, which takes brackets in a path for a pattern
        fs.cp_file(source, target)
        fs.rm_file(source)


def files_of(checkpoint_path: Any, rank: int, world_size: int) -> list[str]:
    """Full paths of all files that `rank` manages, including those of ranks that no longer exist."""
    folder = sidecar_folder(checkpoint_path)
    fs, local = fsspec.core.url_to_fs(folder)
    fs.invalidate_cache()
    try:
        paths = fs.ls(local, detail=False)
    except FileNotFoundError:
        return []
    found = []
    for path in paths:
        name = posixpath.basename(str(path).rstrip("/"))
        match = _NAME.fullmatch(name) or _PARTIAL.fullmatch(name)
        if match is not None and int(match["rank"]) % world_size == rank:
            found.append(posixpath.join(folder, name))
    return sorted(found)


def delete(paths: Iterable[str]) -> None:
    for path in paths:
        fs, local = fsspec.core.url_to_fs(path)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(local)


def remove(checkpoint_path: Any, rank: int, world_size: int) -> None:
    """Remove this rank's files, and the folder once it is empty."""
    delete(files_of(checkpoint_path, rank, world_size))
    fs, folder = fsspec.core.url_to_fs(sidecar_folder(checkpoint_path))
    with contextlib.suppress(OSError):  # another rank may be doing the same, or it is a link to a folder
        if fs.exists(folder) and not fs.ls(folder, detail=False):
            fs.rmdir(folder)


def load(checkpoint_path: Any, entry: ResidualFile) -> Saved:
    """Read one file of the run that saved.

    Raises:
        ResidualFileError: It is missing, damaged, of another rank or run, or holds residuals that are not finite.
    """
    path = _find(checkpoint_path, entry)
    fs, local = fsspec.core.url_to_fs(path)
    try:
        with fs.open(local, "rb") as file:
            if (found := _checksum(file)) != entry.checksum:
                raise ValueError(f"its checksum is {found}, the checkpoint recorded {entry.checksum}")
            file.seek(0)
            saved: Saved = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ResidualFileError(f"the checkpoint's residual file {path} is missing: {ADVICE}") from error
    except Exception as error:  # damaged bytes fail in any of the ways of pickle
        raise ResidualFileError(f"the checkpoint's residual file {path} cannot be read ({error}): {ADVICE}") from error
    if problem := _problem(saved, entry):
        raise ResidualFileError(f"{path} {problem}: {ADVICE}")
    return saved


def _find(checkpoint_path: Any, entry: ResidualFile) -> str:
    """``last.ckpt`` may be a link: then the files are beside it or beside its target."""
    path = path_of(checkpoint_path, entry)
    fs, local = fsspec.core.url_to_fs(path)
    if isinstance(fs, LocalFileSystem) and not os.path.exists(local):
        _, checkpoint = fsspec.core.url_to_fs(str(checkpoint_path))
        beside_target = path_of(os.path.realpath(checkpoint), entry)
        if os.path.exists(beside_target):
            return beside_target
    return path


def _problem(saved: Any, entry: ResidualFile) -> str | None:
    if not isinstance(saved, dict) or "parameters" not in saved:
        return "is not a residual file"
    found = ResidualFile(
        saved.get("step_index", -1), saved.get("rank", -1), saved.get("world_size", -1), entry.checksum
    )
    if found != entry:
        return f"holds the residuals of rank {found.rank} of {found.world_size} at step {found.step}"
    # elsewhere (weights, moments, buffers such as a mask of -inf) a value that is not finite may be right
    for path, x in tree_flatten_with_path(saved["parameters"])[0]:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.float().isfinite().all():
            names = [str(getattr(each, "key", each)) for each in path]
            return f"holds a residual that is not finite, in parameters.{'.'.join(names)}"
    return None
