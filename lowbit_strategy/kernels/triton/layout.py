"""What the kernels are specialised on: a block format in the terms of the device code, and the tile's shape."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from lowbit_strategy.kernels.format import BlockFormat, float_bits

MAX_UNROLLED_CODEBOOK = 16  # more values than these are looked up in memory, in a loop


class Plane(NamedTuple):
    """One bit plane of a format, as the device code needs it.

    Args:
        width: Bits of a code in this plane.
        shift: Position of these bits in the code.
        first_byte: Where the plane starts within a block's packed codes.
        spread: Parts from one that shares a byte to the next; the plane's bytes are so many tensors ``[K, L]``.
        first_tensor: Number of the plane's first byte tensor among those of all planes.
        zero_byte: The byte of a block that cannot be quantised.
    """

    width: int
    shift: int
    first_byte: int
    spread: int
    first_tensor: int
    zero_byte: int


@dataclass(frozen=True, slots=True)
class DeviceFormat:
    """A `BlockFormat` with everything the device code needs worked out; a compile-time constant of every kernel.

    Half-split packing puts elements ``j, j + n, j + 2n ...`` of a block into one byte, so a kernel holds a block as
    `parts` tensors of `length` neighbouring elements each: packing then needs no other thread's elements.

    Args:
        block: Elements of a block.
        bits: Bits of a code.
        qmax: Largest code magnitude of the uniform grid.
        inverse_top: 1 over the largest magnitude among the values.
        max_scale_bits: The largest scale whose outermost value is finite, as bits.
        rule: The scale rule.
        parts: Pieces of a block that share their bytes in the narrowest plane (1 for ternary codes).
        length: Elements of a part.
        planes: One of `Plane` for each bit plane.
        code_nbytes: Packed bytes of a block.
        padded_nbytes: `code_nbytes` rounded up to a power of two (only ternary codes need that).
        codebook, thresholds: Empty on the uniform grid, and where there are too many to unroll.
        steps: How far each value is from the next, if all are float32 numbers: values are then sums, not selected.
        codebook_size: Number of reconstruction values, 0 on the uniform grid.
        zero_code: Code of the elements of a block that cannot be quantised.
        ternary: Three values, five codes to a byte.
        e2m1: Floats of 4 bits: codes and values are found by arithmetic.
    """

    block: int
    bits: int
    qmax: int
    inverse_top: float
    max_scale_bits: int
    rule: str
    parts: int
    length: int
    planes: tuple[Plane, ...]
    code_nbytes: int
    padded_nbytes: int
    codebook: tuple[float, ...]
    thresholds: tuple[float, ...]
    steps: tuple[float, ...]
    codebook_size: int
    zero_code: int
    ternary: bool
    e2m1: bool


@functools.lru_cache(maxsize=256)
def device_format(fmt: BlockFormat) -> DeviceFormat:
    parts = 1 if fmt.is_ternary else 8 // min(fmt.planes)
    codebook = fmt.codebook or ()
    unrolled = len(codebook) <= MAX_UNROLLED_CODEBOOK
    steps = tuple(b - a for a, b in pairwise(codebook))
    exact = all(struct.unpack("f", struct.pack("f", step))[0] == step for step in steps)
    return DeviceFormat(
        block=fmt.block_size,
        bits=fmt.bits,
        qmax=fmt.qmax,
        inverse_top=1.0 / fmt.top,
        max_scale_bits=float_bits(fmt.max_scale),
        rule=fmt.scale_rule,
        parts=parts,
        length=fmt.block_size // parts,
        planes=_planes(fmt, parts),
        code_nbytes=fmt.code_nbytes,
        padded_nbytes=1 << (fmt.code_nbytes - 1).bit_length(),
        codebook=codebook if unrolled else (),
        thresholds=fmt.thresholds if unrolled else (),
        steps=steps if unrolled and exact else (),
        codebook_size=len(codebook),
        zero_code=fmt.zero_code,
        ternary=fmt.is_ternary,
        e2m1=fmt.is_e2m1,
    )


def _planes(fmt: BlockFormat, parts: int) -> tuple[Plane, ...]:
    planes: list[Plane] = []
    shift, first_byte, first_tensor = 0, 0, 0
    for width in fmt.planes:
        spread = max(1, parts * width // 8)
        field = (fmt.zero_code >> shift) & ((1 << width) - 1)
        zero_byte = sum(field << (k * width) for k in range(8 // width))
        planes.append(Plane(width, shift, first_byte, spread, first_tensor, zero_byte))
        shift, first_byte, first_tensor = shift + width, first_byte + fmt.block_size * width // 8, first_tensor + spread
    return tuple(planes)


@functools.lru_cache(maxsize=64)
def codebook_table(fmt: BlockFormat, device: torch.device) -> torch.Tensor:
    """float32 on `device`: thresholds, then codebook; a single zero where the kernels have no use for it."""
    if fmt.codebook is None or len(fmt.codebook) <= MAX_UNROLLED_CODEBOOK:
        return torch.zeros(1, device=device)
    return torch.tensor((*fmt.thresholds, *fmt.codebook), dtype=torch.float32, device=device)
