"""The programs of a launch: the tiles on which they work, and a kernel with all that no call changes.

A tile is some whole blocks of one segment.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import Format
from lowbit_strategy.kernels.segments import Segments


class Tiles(NamedTuple):
    """Where each program works.

    Args:
        count: Programs.
        segment_of_tile: int32 [count].
        rows: int64 [S, 7]: first element of x, first block of the residual, first byte of the codes and of the scales,
            elements, first tile, salt.
    """

    count: int
    segment_of_tile: Tensor
    rows: Tensor


def tiles_of(segments: Segments, fmt: Format, tile: int, device: torch.device) -> Tiles:
    """The tiles of a segment table, kept with it: 4 bytes per tile and 56 per segment on the device."""
    block = fmt.block_size

    def tiles() -> Tiles:
        x_S, numel_S, state_S, wire_S, salt_S = segments.table.unbind(1)
        num_blocks_S = -(-numel_S // block)
        num_tiles_S = -(-numel_S // tile)
        first_S = num_tiles_S.cumsum(0) - num_tiles_S
        scales_S = wire_S + num_blocks_S * fmt.code_nbytes
        rows = torch.stack((x_S, state_S // block, wire_S, scales_S, numel_S, first_S, salt_S), 1)
        segment_of_tile = torch.arange(len(segments), dtype=torch.int32).repeat_interleave(num_tiles_S)
        return Tiles(count=segment_of_tile.numel(), segment_of_tile=segment_of_tile.to(device), rows=rows.to(device))

    return segments.kept(("triton", block, fmt.code_nbytes, tile, device), tiles)


class Program:
    """A kernel with the arguments that no call changes. Once it is compiled, calls go directly to its code, because
    Triton would look at every argument again, which takes the host longer than everything else.

    Args:
        kernel: Its first parameters are the tables of `tiles`, its last ones `constants`.
        tiles: Where its programs work.
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
    """Triton launches on the current GPU, regardless of the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
