"""The launch grid: tiles of whole blocks within one segment, and how large a tile is for which format."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat, DenseFormat
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.kernels.triton.layout import DeviceFormat


class TileShape(NamedTuple):
    """A compile-time constant of the kernels.

    Args:
        rows: Blocks.
        vector: Neighbouring elements of a thread, at most.
        threads: Threads that share a row of a part, as Triton will spread it.
    """

    rows: int
    vector: int
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is laid out on the GPU; speed only, the bytes do not depend on it.

    Args:
        elements_per_thread: More: less overhead for a block's scale and a tile's addresses, but more registers.
        num_warps: Warps of a program. Few: a reduction over a block needs no barrier and programs end one by one.
        vector: Neighbouring elements of a thread, at most. 4 float32 are one 16-byte access.
        pieces: That a tile with a tail or unaligned floats is worked off in: more are fewer registers, and less code.
    """

    elements_per_thread: int
    num_warps: int
    vector: int
    pieces: int = 4

    def tile(self, block: int) -> int:
        return max(block, self.elements_per_thread * self.num_warps * 32)

    def shapes(self, fmt: DeviceFormat) -> tuple[TileShape, TileShape]:
        """Of a whole tile, and of the pieces that one with masks is worked off in."""
        rows = self.tile(fmt.block) // fmt.block
        return self._shape(fmt, rows), self._shape(fmt, max(1, rows // self.pieces))

    def _shape(self, fmt: DeviceFormat, rows: int) -> TileShape:
        per_thread = max(1, rows * fmt.length // (self.num_warps * 32))
        return TileShape(rows, self.vector, max(1, fmt.length // min(self.vector, per_thread)))


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


def tiles_of(segments: Segments, fmt: BlockFormat | DenseFormat, tile: int, device: torch.device) -> Tiles:
    """The tiles of a segment table, made once and kept with it: 4 bytes per tile and 56 per segment on the device."""
    block = fmt.block_size
    key = ("triton", block, fmt.code_nbytes, tile, device)
    if key not in segments.cache:
        x_S, numel_S, state_S, wire_S, salt_S = segments.table.unbind(1)
        num_blocks_S = -(-numel_S // block)
        num_tiles_S = -(-numel_S // tile)
        first_S = num_tiles_S.cumsum(0) - num_tiles_S
        scales_S = wire_S + num_blocks_S * fmt.code_nbytes
        rows = torch.stack((x_S, state_S // block, wire_S, scales_S, numel_S, first_S, salt_S), 1)
        segment_of_tile = torch.arange(len(segments), dtype=torch.int32).repeat_interleave(num_tiles_S)
        segments.cache[key] = Tiles(
            count=segment_of_tile.numel(), segment_of_tile=segment_of_tile.to(device), rows=rows.to(device)
        )
    return segments.cache[key]  # type: ignore[return-value]


def encode_launch(fmt: DeviceFormat, residual: torch.dtype | None = None, *, dithered: bool = False) -> Launch:
    """Reasoned from registers and bytes in flight; see docs/kernels.md. `benchmarks/gpu_kernels.py --sweep` checks."""
    if residual == torch.float32:  # 16-byte stores of the residual
        return Launch(elements_per_thread=4 * max(4, fmt.parts), num_warps=4, vector=4)
    if fmt.parts == 1:
        return Launch(elements_per_thread=16, num_warps=4, vector=16)
    if dithered and fmt.codebook_size > 0 and fmt.parts < 8:  # else the hashes and the codebook need every register
        return Launch(elements_per_thread=16, num_warps=4, vector=16 // fmt.parts)
    return Launch(elements_per_thread=32, num_warps=4, vector=32 // fmt.parts)


def decode_launch(fmt: DeviceFormat) -> Launch:
    """Loads of up to 16 bytes of codes per thread: eight ranks' are under way at once, and each is an instruction."""
    return Launch(elements_per_thread=32, num_warps=4, vector=min(16, 32 // fmt.parts), pieces=8)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current GPU, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
