"""The launch grid: tiles of whole blocks within one segment, and how large a tile is on which format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.layout import DeviceFormat

ROW_FIELDS = 6  # x_offset, numel, state_offset, wire_offset, salt, first tile


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is laid out on the GPU; speed only, the bytes do not depend on it.

    Args:
        elements_per_thread: More: fewer programs and less overhead for a block's scale, but more registers.
        num_warps: Warps of a program. Few: a reduction over a block needs no barrier and programs end one by one.
        vector: Neighbouring elements of a thread, at most. 4 float32 are one 16-byte access.
    """

    elements_per_thread: int
    num_warps: int
    vector: int

    def tile(self, block: int) -> int:
        return max(block, self.elements_per_thread * self.num_warps * 32)


class Tiles(NamedTuple):
    """Where each program works. ``segment_of_tile`` is int32 [T]; ``rows`` is int64 [S, ROW_FIELDS]."""

    count: int
    segment_of_tile: Tensor
    rows: Tensor


def tiles_of(segments: Segments, block: int, tile: int, device: torch.device) -> Tiles:
    """The tiles of a segment table, made once and kept with it: 4 bytes a tile and 48 a segment on the device."""
    key = ("triton", block, tile, device)
    if key not in segments.cache:
        numel_S = segments.table[:, 1]
        num_blocks_S = (numel_S + block - 1).div(block, rounding_mode="floor")
        blocks_per_tile = tile // block
        num_tiles_S = (num_blocks_S + blocks_per_tile - 1).div(blocks_per_tile, rounding_mode="floor")
        first_S = num_tiles_S.cumsum(0) - num_tiles_S
        segment_of_tile = torch.arange(len(segments), dtype=torch.int32).repeat_interleave(num_tiles_S)
        segments.cache[key] = Tiles(
            count=segment_of_tile.numel(),
            segment_of_tile=segment_of_tile.to(device),
            rows=torch.cat((segments.table, first_S[:, None]), 1).contiguous().to(device),
        )
    return segments.cache[key]  # type: ignore[return-value]


def encode_launch(fmt: DeviceFormat, x_dtype: torch.dtype, residual_dtype: torch.dtype | None) -> Launch:
    """Starting points reasoned from registers and bytes in flight; `benchmarks/gpu_kernels.py --sweep` checks them."""
    if residual_dtype == torch.float32:
        return Launch(elements_per_thread=4 * max(2, fmt.parts), num_warps=4, vector=4)
    if fmt.parts == 8:
        return Launch(elements_per_thread=32, num_warps=4, vector=4)
    return Launch(elements_per_thread=16, num_warps=4, vector=16 // fmt.parts if fmt.parts > 1 else 8)


def decode_launch(fmt: DeviceFormat, out_dtype: torch.dtype) -> Launch:
    vector = 4 if out_dtype == torch.float32 else 8
    return Launch(elements_per_thread=max(16, vector * fmt.parts), num_warps=4, vector=vector)
