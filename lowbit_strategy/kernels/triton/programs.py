"""The programs of a launch: a kernel with all arguments that are the same in every call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lowbit_strategy.kernels.triton.tiles import Tiles


class Program:
    """A kernel with the arguments that are the same in every call. Once it is compiled, calls go directly to its code,
    because Triton would check every argument again, which takes the host longer than everything else.

    Args:
        kernel: Its first parameters are the tables of `tiles`, its last ones `constants`.
        tiles: The tiles of its programs.
        device: Device of all tensors.
        constants: Compile-time constants.
        options: Options of the compiler.
    """

    def __init__(
        self, kernel: Any, tiles: Tiles, device: torch.device, constants: tuple[object, ...], **options: object
    ) -> None:
        self._kernel, self._device, self._options = kernel, device, options
        self._grid = (tiles.count, 1, 1)
        self._tables, self._constants = (tiles.segment_of_tile, tiles.rows), constants
        self._run: Callable[..., object] | None = None

    def launch(self, *args: object, aligned: bool = True) -> None:
        """Run the kernel with the other arguments, whose types must not change between calls. `aligned`: whether all
        tensors that the compiler assumes to be aligned to 16 bytes are.
        """
        if not self._grid[0]:
            return
        with on(self._device):
            if aligned and self._run is not None:
                self._run(*self._tables, *args, *self._constants)
                return
            compiled = self._kernel[self._grid](*self._tables, *args, *self._constants, **self._options)
        # the interpreter compiles nothing; on AMD's GPUs code also depends on the sizes of tensors
        if aligned and compiled is not None and torch.version.hip is None:
            self._run = compiled[self._grid]


def on(device: torch.device) -> AbstractContextManager[object]:
    """A context with `device` as the current GPU, on which Triton launches regardless of the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
