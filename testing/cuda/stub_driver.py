"""Launches of Triton kernels without a GPU: compiled for one, and handed to a driver that notes what it gets."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Launch(NamedTuple):
    """What the driver gets: programs, stream, the number of the loaded code, and the kernel's arguments."""

    grid: tuple[int, ...]
    stream: int
    function: int
    arguments: tuple[Any, ...]


class _Utilities:
    def __init__(self) -> None:
        self._loaded = itertools.count(1)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232_448}

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 0, next(self._loaded), 32, 0, 1024  # module, function, registers, spills, threads


class _Driver:
    """Of an H200."""

    def __init__(self, launched: list[Launch]) -> None:
        self._launched = launched
        self.utils = _Utilities()

    def launcher_cls(self, *_: object) -> Callable[..., None]:
        def launch(*given: Any) -> None:  # with metadata and two hooks before the arguments
            self._launched.append(Launch(given[:3], given[3], given[4], given[9:]))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@contextmanager
def launches(*kernels: JITFunction[Any]) -> Iterator[list[Launch]]:
    """Inside, kernels can be launched on CPU tensors. Gives them as the driver gets them.

    Args:
        kernels: That are launched: what is compiled of them inside is forgotten afterwards.
    """
    launched: list[Launch] = []
    with patch.object(driver, "_active", _Driver(launched)):
        yield launched
    for kernel in kernels:
        kernel.device_caches.clear()


def calls_of(function: Callable[[], object]) -> int:
    """Calls of functions, Python's and built-in ones, while `function` runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count - 2  # this one, and the end
