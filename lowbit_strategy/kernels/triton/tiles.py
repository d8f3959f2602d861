"""Tiles, on which programs work: the table of all tiles, and a program's look-up of its tile.

A tile is some whole blocks of one segment. A block's elements are held as a tuple of parts ``[rows, length]``, one row
per block, see `lowbit_strategy.kernels.triton.layout`; numbers of a block are ``[rows]``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.format import Format
from lowbit_strategy.kernels.segments import Segments

NUM_COLUMNS = tl.constexpr(7)
X, BLOCK, CODES, SCALES, NUMEL, FIRST_TILE, SALT = map(tl.constexpr, range(NUM_COLUMNS.value))


class Tiles(NamedTuple):
    """The tile of each program.

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
        num_tiles_S = -(-numel_S // tile)
        rows = torch.empty(len(segments), NUM_COLUMNS.value, dtype=torch.int64)
        rows[:, X.value] = x_S
        rows[:, BLOCK.value] = state_S // block
        rows[:, CODES.value] = wire_S
        rows[:, SCALES.value] = wire_S + -(-numel_S // block) * fmt.code_nbytes
        rows[:, NUMEL.value] = numel_S
        rows[:, FIRST_TILE.value] = num_tiles_S.cumsum(0) - num_tiles_S
        rows[:, SALT.value] = salt_S
        segment_of_tile = torch.arange(len(segments), dtype=torch.int32).repeat_interleave(num_tiles_S)
        return Tiles(count=segment_of_tile.numel(), segment_of_tile=segment_of_tile.to(device), rows=rows.to(device))

    return segments.kept(("triton", block, fmt.code_nbytes, tile, device), tiles)


@triton.jit
def locate(segment_of_tile, segments, floats, TILE: tl.constexpr):
    """The segment's row; this program's tile within the segment, in 64 bits, since buffers may be longer than 2**31;
    the tile's first element of `floats`, and the number of elements (at most TILE); whether there are TILE and they are
    aligned to 16 bytes, so that no access needs a mask.
    """
    program = tl.program_id(0)
    row = segments + tl.load(segment_of_tile + program).to(tl.int64) * NUM_COLUMNS
    tile = (program - tl.load(row + FIRST_TILE).to(tl.int32)).to(tl.int64)
    left = tl.minimum(tl.load(row + NUMEL) - tile * TILE, TILE).to(tl.int32)
    start = tl.load(row + X) + tile * TILE
    is_plain = (left == TILE) & (((floats + start).to(tl.int64) & 15) == 0)
    return row, tile, start, left, is_plain
