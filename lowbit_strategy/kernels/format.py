"""The wire format of block-quantized tensors.

A block of ``block_size`` elements becomes packed codes and one bfloat16 scale. Element ``i`` decodes to
``codebook[code_i] * scale``. Everything that differs between methods (the number of values, their positions, the rule
for the scale) is data in `BlockFormat`, so the kernels are written only once.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

ScaleRule = Literal["absmax", "rms", "mean_abs"]

SCALE_NBYTES = 2  # bfloat16: the range of float32, so tiny gradients keep their scale
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
MIN_BLOCK_SIZE, MAX_BLOCK_SIZE = 32, 4096
MAX_CODEBOOK = 16
E2M1 = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # twice the standard's values


def float_bits(x: float) -> int:
    """Bits of the nearest float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits


def bit_planes(bits: int) -> tuple[int, ...]:
    """Widths that divide a byte and add up to this many bits, the widest first."""
    rest = [width for width in (4, 2, 1) if bits % 8 & width]
    return (*[8] * (bits // 8), *rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFormat:
    """The format of one block of floats.

    Args:
        bits: Bits of a code, 1 to 8. More bits: more bytes, less error. Ternary codes (three values) are declared with
            2 bits and packed five to a byte.
        block_size: Elements that share a scale, a power of two. Smaller: less error, more bytes for scales.
        scale_rule: ``absmax``: largest magnitude divided by the top value (nothing is clipped); ``rms``: root mean
            square; ``mean_abs``: mean magnitude.
        codebook: Reconstruction values in units of the scale, ascending: at most 2**bits and at most 16, each with
            16 significant bits or fewer, so that ``value * scale`` is exact in float32. None: the uniform grid
            ``-(2**(bits-1)-1) ... 2**(bits-1)-1``.
        thresholds: Decision points between neighboring values, in units of the scale, ascending: the code of y is the
            number of thresholds below y. Empty: the midpoints, which have the least error for these values.
    """

    bits: int = 4
    block_size: int = 128
    scale_rule: ScaleRule = "absmax"
    codebook: tuple[float, ...] | None = None
    thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"bits must be an integer from 1 to 8, got {self.bits!r}")
        size = self.block_size
        if not isinstance(size, int) or size & (size - 1) or not MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE:
            raise ValueError(
                f"block_size must be a power of two from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}, got {size!r}"
            )
        if self.codebook is None:
            if self.bits == 1:
                raise ValueError(
                    "1-bit codes have no uniform grid with a zero: give a codebook, such as (-0.798, 0.798)"
                )
            if self.scale_rule != "absmax":
                raise ValueError(f"scale_rule={self.scale_rule!r} needs a codebook; the uniform grid uses 'absmax'")
            if self.thresholds:
                raise ValueError("thresholds need a codebook; the uniform grid rounds to the nearest value")
            return
        most = min(2**self.bits, MAX_CODEBOOK)
        if not 2 <= len(self.codebook) <= most or list(self.codebook) != sorted(set(self.codebook)):
            raise ValueError(f"codebook must be 2 to {most} ascending numbers, got {self.codebook}")
        if self.scale_rule == "absmax" and self.codebook[0] != -self.codebook[-1]:
            raise ValueError(
                f"scale_rule 'absmax' needs a codebook that reaches as far below zero as above, got {self.codebook}"
            )
        if not self.thresholds:
            halfway = tuple((a + b) / 2 for a, b in pairwise(self.codebook))
            object.__setattr__(self, "thresholds", halfway)
        elif len(self.thresholds) != len(self.codebook) - 1 or list(self.thresholds) != sorted(set(self.thresholds)):
            raise ValueError(f"thresholds must be {len(self.codebook) - 1} ascending numbers, got {self.thresholds}")

    @property
    def is_uniform(self) -> bool:
        return self.codebook is None

    @property
    def is_ternary(self) -> bool:
        """Whether there are three values, packed five to a byte."""
        return self.codebook is not None and len(self.codebook) == 3 and self.bits == 2

    @property
    def is_e2m1(self) -> bool:
        """Whether this is `e2m1`'s format, whose codes are found by arithmetic."""
        return self == e2m1(self.block_size)

    @property
    def qmax(self) -> int:
        """Largest code magnitude of the uniform grid; the code of value q is q + qmax."""
        return 2 ** (self.bits - 1) - 1

    @property
    def top(self) -> float:
        """The largest magnitude among the values, in units of the scale."""
        return float(self.qmax) if self.codebook is None else max(-self.codebook[0], self.codebook[-1])

    @property
    def zero_code(self) -> int:
        """The code of zero, written where there is nothing to send (idle and non-finite blocks, padding)."""
        return self.qmax if self.codebook is None else len(self.codebook) // 2

    @property
    def max_scale(self) -> float:
        """The largest bfloat16 scale whose outermost value is still a float32."""
        bits = float_bits(FLOAT32_MAX / max(self.top, 1.0)) & 0xFFFF0000
        scale: float = struct.unpack("<f", struct.pack("<I", bits))[0]
        return scale

    @property
    def planes(self) -> tuple[int, ...]:
        """Widths of the bit planes a code is cut into, low bits first: 3 bits are a 2-bit and a 1-bit plane."""
        return bit_planes(self.bits)

    @property
    def code_nbytes(self) -> int:
        """Bytes of one block's packed codes, without its scale."""
        if self.is_ternary:
            return math.ceil(self.block_size / 5)
        return self.block_size * self.bits // 8

    @property
    def bits_per_element(self) -> float:
        return (self.code_nbytes + SCALE_NBYTES) * 8 / self.block_size

    def num_blocks(self, numel: int) -> int:
        return -(-numel // self.block_size)

    def wire_nbytes(self, numel: int) -> int:
        """Bytes of a segment: all blocks' codes, then all blocks' scales. A short last block is padded."""
        return self.num_blocks(numel) * (self.code_nbytes + SCALE_NBYTES)


def uniform(bits: int, block_size: int) -> BlockFormat:
    """LoCo's format: 2**bits - 1 evenly spaced values, scaled by the largest magnitude."""
    return BlockFormat(bits=bits, block_size=block_size)


@functools.cache
def e2m1(block_size: int) -> BlockFormat:
    """4-bit floats, "FP4": a sign, two bits of exponent, one of mantissa. 12 is the block's largest magnitude.

    Values are a twelfth of it apart up to a third of it, a sixth up to two thirds, and a third above; on an even grid
    of 4 bits they are a seventh apart everywhere. A number halfway between two values is rounded to the lower one,
    while OCP's formats round to even.
    """
    codebook = (*(-value for value in reversed(E2M1)), 0.0, *E2M1)
    return BlockFormat(bits=4, block_size=block_size, codebook=codebook)


def ternary(block_size: int) -> BlockFormat:
    """-1, 0 and 1 times the largest magnitude, five trits per byte: exact for votes, which all have one magnitude."""
    return BlockFormat(bits=2, block_size=block_size, codebook=(-1.0, 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """Plain floats, or floats rounded to the nearest bfloat16: blocks of one element without a scale."""

    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def block_size(self) -> int:
        return 1

    @property
    def code_nbytes(self) -> int:
        return self.torch_dtype.itemsize

    def num_blocks(self, numel: int) -> int:
        return numel

    def wire_nbytes(self, numel: int) -> int:
        return numel * self.code_nbytes


Format = BlockFormat | DenseFormat  # the format of a message's section
