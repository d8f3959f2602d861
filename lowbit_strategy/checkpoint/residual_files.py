"""Files next to a checkpoint: ``<checkpoint>.lowbit/step-<step>-rank-<rank>-of-<world>-<run>.<skipped>-<checksum>.pt``.

Each rank that saves writes one file. Its name identifies the save and contains the checksum of its bytes. The
checkpoint's stamp identifies the save too, without the checksum, so that no rank needs to know the others' files before
loading. Two different files never share a name: files of a new checkpoint are written before it, and those of a
replaced checkpoint are removed after it. Damaged or swapped files are refused.

A stamp is plain data for JSON or any framework's file, the same on all ranks:

| key | what |
|---|---|
| `run`, `step_index`, `num_skipped` | the `SavePoint` when it was saved |
| `world_size` | of the run that saved |
| `parameters` | names of all parameters with residuals |
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

from lowbit_strategy.checkpoint.capture import FORMAT, Saved

Stamp = dict[str, Any]

SUFFIX = ".lowbit"
ADVICE = (
    'restore the file, or pass on_missing_residual="reset" to continue with residuals of zero'
    " (the checkpoint itself is not affected)"
)
_NAME = re.compile(
    r"step-(?P<step>\d+)-rank-(?P<rank>\d+)-of-(?P<world_size>\d+)-(?P<run>[0-9a-f]+)\.(?P<skipped>\d+)-"
    r"(?P<end>[0-9a-f]+\.(?:pt|part))"
)
_READ_NBYTES = 1 << 20


class ResidualFileError(RuntimeError):
    """A residual file cannot be written, or the one that a checkpoint needs is missing, damaged or the wrong one."""


class MissingResidualFile(ResidualFileError):
    """A rank has no residual file next to a checkpoint: it did not save, or its file was lost."""


class SavePoint(NamedTuple):
    """When residuals were saved; the same on all ranks, although they do not ask each other.

    Args:
        run: A random value that ranks share, drawn when training begins or a checkpoint is loaded.
        step: Optimizer steps completed.
        skipped: Steps that overflowed so far.
    """

    run: str
    step: int
    skipped: int

    def is_before(self, other: SavePoint) -> bool:
        """Whether this save point is known to be before `other`; those of other runs count as earlier."""
        return self.run != other.run or self[1:] < other[1:]


class ResidualFile(NamedTuple):
    """The file of one rank that saved. `end`, the checksum and ``.pt``, is unknown until it is written."""

    saved_at: SavePoint
    rank: int
    world_size: int
    end: str = ""

    @property
    def name(self) -> str:
        run, step, skipped = self.saved_at
        return f"step-{step}-rank-{self.rank}-of-{self.world_size}-{run}.{skipped}-{self.end}"

    @property
    def is_whole(self) -> bool:
        """Whether the file is complete."""
        return self.end.endswith(".pt")

    @classmethod
    def of(cls, saved: Saved) -> ResidualFile:
        """The file to which `saved` belongs."""
        saved_at = SavePoint(saved["run"], saved["step_index"], saved["num_skipped"])
        return cls(saved_at, saved["rank"], saved["world_size"])

    @classmethod
    def of_stamp(cls, stamp: Stamp, rank: int) -> ResidualFile:
        """The file of the rank `rank` of the run that saved."""
        saved_at = SavePoint(stamp["run"], stamp["step_index"], stamp["num_skipped"])
        return cls(saved_at, rank, stamp["world_size"])


def sidecar_folder(checkpoint_path: Any) -> str:
    return str(checkpoint_path).rstrip("/") + SUFFIX


def path_of(checkpoint_path: Any, file: ResidualFile) -> str:
    return posixpath.join(sidecar_folder(checkpoint_path), file.name)


class _Hashing:
    """A writable file that computes a checksum."""

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
    while part := file.read(_READ_NBYTES):
        digest.update(part)
    return _short(digest)


def save(checkpoint_path: Any, saved: Saved) -> ResidualFile:
    """Write this rank's file, atomically.

    Raises:
        ResidualFileError: The file cannot be written, for example because the disk is full. Nothing is left behind.
    """
    folder = sidecar_folder(checkpoint_path)
    fs, local = fsspec.core.url_to_fs(folder)
    whole = ResidualFile.of(saved)
    partial = posixpath.join(local, whole._replace(end=f"{uuid.uuid4().hex}.part").name)
    try:
        fs.makedirs(local, exist_ok=True)
        with fs.open(partial, "wb") as raw:
            file = _Hashing(raw)
            torch.save(saved, file)  # type: ignore[arg-type]  # it only writes and flushes
        whole = whole._replace(end=f"{file.checksum}.pt")
        _move(fs, partial, posixpath.join(local, whole.name))
    except BaseException as error:
        with contextlib.suppress(Exception):
            fs.rm_file(partial)
        if not isinstance(error, Exception):
            raise
        cause = f"{type(error).__name__}: {_innermost(error)}"
        raise ResidualFileError(
            f"the residuals of rank {saved['rank']} cannot be written to {folder} ({cause}): the checkpoint lacks them,"
            " and a run that resumes from it starts with residuals of zero. Free some space or give a different folder"
        ) from error
    return whole


def _innermost(error: BaseException) -> BaseException:
    """The first error, since torch's writer fails again when it is closed."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _move(fs: Any, source: str, target: str) -> None:
    if isinstance(fs, LocalFileSystem):
        os.replace(source, target)
    else:  # not fs.mv, which treats brackets in a path as a pattern
        fs.cp_file(source, target)
        fs.rm_file(source)


def files_of(checkpoint_path: Any) -> list[ResidualFile]:
    """All files next to a checkpoint, of all ranks and runs, including incomplete ones."""
    fs, local = fsspec.core.url_to_fs(sidecar_folder(checkpoint_path))
    fs.invalidate_cache()
    try:
        paths = fs.ls(local, detail=False)
    except FileNotFoundError:
        return []
    found = []
    for path in paths:
        if match := _NAME.fullmatch(posixpath.basename(str(path).rstrip("/"))):
            saved_at = SavePoint(match["run"], int(match["step"]), int(match["skipped"]))
            found.append(ResidualFile(saved_at, int(match["rank"]), int(match["world_size"]), match["end"]))
    return sorted(found)


def delete(checkpoint_path: Any, files: Iterable[ResidualFile]) -> None:
    """Delete these files; other ranks may be deleting them too."""
    fs, folder = fsspec.core.url_to_fs(sidecar_folder(checkpoint_path))
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(posixpath.join(folder, file.name))


def remove(checkpoint_path: Any, rank: int, world_size: int) -> None:
    """The checkpoint was removed: delete this rank's files and those of ranks that no longer exist; rank 0 deletes all
    files. The last rank deletes the folder.
    """
    files = files_of(checkpoint_path)
    delete(checkpoint_path, (file for file in files if rank in (0, file.rank % world_size)))
    fs, folder = fsspec.core.url_to_fs(sidecar_folder(checkpoint_path))
    with contextlib.suppress(OSError):  # another rank may be doing the same, or it is a link to a folder
        if fs.exists(folder) and not fs.ls(folder, detail=False):
            fs.rmdir(folder)


def load(checkpoint_path: Any, file: ResidualFile) -> Saved:
    """Read one file of the run that saved; the `end` of `file` is unknown.

    Raises:
        MissingResidualFile: There is no such file.
        ResidualFileError: It is damaged, belongs to a different rank or run, or holds residuals that are not finite.
    """
    path = _find(checkpoint_path, file)
    fs, local = fsspec.core.url_to_fs(path)
    expected = posixpath.basename(path).rpartition("-")[2].removesuffix(".pt")
    try:
        with fs.open(local, "rb") as opened:
            if (found := _checksum(opened)) != expected:
                raise ValueError(f"its checksum is {found}, but its name has {expected}")
            opened.seek(0)
            saved: Saved = torch.load(opened, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can make pickle fail in many ways
        raise ResidualFileError(f"the checkpoint's residual file {path} cannot be read ({error}): {ADVICE}") from error
    if problem := _problem(saved, file):
        raise ResidualFileError(f"{path} {problem}: {ADVICE}")
    return saved


def _find(checkpoint_path: Any, file: ResidualFile) -> str:
    """Find the file. If ``last.ckpt`` is a link, the files are next to it or to its target. A rank that saved twice at
    one save point, and was stopped before the first file was removed, has two files, which are nearly always equal.
    """
    places = [checkpoint_path]
    fs, local = fsspec.core.url_to_fs(str(checkpoint_path))
    if isinstance(fs, LocalFileSystem):
        places.append(os.path.realpath(local))
    for place in places:
        for each in files_of(place):
            if each.is_whole and each._replace(end="") == file:
                return path_of(place, each)
    raise MissingResidualFile(
        f"the checkpoint's residual file {path_of(checkpoint_path, file)}*.pt is missing: {ADVICE}"
    )


def _problem(saved: Any, file: ResidualFile) -> str | None:
    if not isinstance(saved, dict) or "parameters" not in saved:
        return "is not a residual file"
    if (found := saved.get("format")) != FORMAT:
        return f"has format {found!r} and this version reads {FORMAT}: load it with the version that wrote it, or else"
    if (holds := ResidualFile.of(saved)) != file:
        return f"holds the residuals of rank {holds.rank} of {holds.world_size} at step {holds.saved_at.step}"
    # elsewhere (weights, moments, buffers such as a mask of -inf) non-finite values may be right
    for path, x in tree_flatten_with_path(saved["parameters"])[0]:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and not x.float().isfinite().all():
            names = [str(getattr(each, "key", each)) for each in path]
            return f"holds a residual that is not finite, in parameters.{'.'.join(names)}"
    return None
