"""Real text that every machine has: the source of Python's own standard library, read as bytes.

Which bytes these are depends on the Python release, so losses compare only between runs of one interpreter.
"""

from __future__ import annotations

import functools
import os
import sysconfig
import zlib
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

Split = Literal["train", "validation"]

# Installed packages are not the library, and some distributions leave its own tests out.
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}
_TESTS = {"test", "tests", "idle_test"}
_VALIDATION_SHARE = 10  # one file in so many


@functools.cache
def standard_library(split: Split, *, tests: bool = False) -> Tensor:
    """All files of one split, joined in the order of their names, as uint8 [N]; with its `tests`, where they are there,
    three times as many.

    A file belongs to a split by the checksum of its name: validation holds whole files that training never saw.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    excluded = _EXCLUDED if tests else _EXCLUDED | _TESTS
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = set(inner) - excluded  # which may be many times the library
        names += [Path(folder, file).relative_to(root) for file in files if file.endswith(".py")]
    ours = sorted(name.as_posix() for name in names if split_of(name) == split)
    if not ours:
        raise FileNotFoundError(f"no Python sources in {root}: this interpreter comes without its library's source")
    return torch.frombuffer(bytearray().join((root / name).read_bytes() for name in ours), dtype=torch.uint8)


def split_of(name: Path) -> Split:
    return "validation" if zlib.crc32(name.as_posix().encode()) % _VALIDATION_SHARE == 0 else "train"


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Neighboring windows of a text: item i is (bytes, the bytes one further on), each int64 [context].

    Args:
        text: uint8 [N].
        context: Bytes a window.
        limit: At most so many windows, spread evenly over the text; None takes all.
    """

    def __init__(self, text: Tensor, context: int, limit: int | None = None) -> None:
        available = (text.numel() - 1) // context
        if available < 1:
            raise ValueError(f"{text.numel()} bytes hold no window of {context} and the byte after it")
        self.text = text
        self.context = context
        self.count = available if limit is None else min(limit, available)
        self.stride = available // self.count * context

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        start = index * self.stride
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]
