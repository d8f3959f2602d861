"""The specialization of kernels: the block format as the device code needs it, and the shape of a tile."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

from lowbit_strategy.kernels.format import BlockFormat, float_bits


class Plane(NamedTuple):
    """One bit plane of a format, as the device code needs it.

    Args:
        width: Bits of a code in this plane.
        shift: Position of these bits in the code.
        first_byte: Where the plane starts within a block's packed codes.
        spread: Distance, in parts, between parts that share a byte; the plane's bytes are this many tensors ``[K, L]``.
        first_tensor: Number of the plane's first byte tensor among those of all planes.
        zero_byte: The byte of a block that cannot be quantized.
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
    `parts` tensors of `length` neighboring elements each: packing then needs no other thread's elements.

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
        padded_nbytes: `code_nbytes` rounded up to a power of two (only needed for ternary codes).
        codebook, thresholds: Empty on the uniform grid.
        steps: Distances between neighboring values, if all are float32 numbers: values are then sums, not selected.
        zero_code: Code of the elements of a block that cannot be quantized.
        ternary: Three values, five codes to a byte.
        e2m1: Floats of 4 bits: codes and values are found by arithmetic.
        zero_word: Four of the first plane's `zero_byte`.
        words: Whether codes of one plane that stand for integers or 4-bit floats are written and read as words.
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
    zero_code: int
    zero_word: int
    ternary: bool
    e2m1: bool
    words: bool


@functools.lru_cache(maxsize=256)
def device_format(fmt: BlockFormat) -> DeviceFormat:
    parts = 1 if fmt.is_ternary else 8 // min(fmt.planes)
    planes = _planes(fmt, parts)
    codebook = fmt.codebook or ()
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
        planes=planes,
        code_nbytes=fmt.code_nbytes,
        padded_nbytes=1 << (fmt.code_nbytes - 1).bit_length(),
        codebook=codebook,
        thresholds=fmt.thresholds,
        steps=steps if exact else (),
        zero_code=fmt.zero_code,
        zero_word=signed(planes[0].zero_byte * 0x01010101),
        ternary=fmt.is_ternary,
        e2m1=fmt.is_e2m1,
        words=len(fmt.planes) == 1 and (fmt.is_uniform or fmt.is_e2m1),
    )


def signed(number: int) -> int:
    """The int32 with the same lowest 32 bits."""
    return (number & 0xFFFFFFFF) - ((number & 0x80000000) << 1)


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


class TileShape(NamedTuple):
    """A compile-time constant of the kernels.

    Args:
        rows: Blocks.
        vector: Neighboring elements of a thread, at most.
        threads: Threads that share a row of a part, as Triton will spread it.
    """

    rows: int
    vector: int
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a kernel is laid out on the GPU. This affects speed only, not bytes.

    Args:
        elements_per_thread: More: less overhead for a block's scale and a tile's addresses, but more registers.
        num_warps: Warps of a program. Few: a reduction over a block needs no barrier and programs end one by one.
        vector: Neighboring elements of a thread, at most. 4 float32 are one 16-byte access.
        pieces: Number of steps in which a tile with a tail or unaligned floats is processed: more steps need fewer
            registers and less code.
        max_registers: Limit of registers per thread, on NVIDIA GPUs: fewer registers allow more warps at a time.
    """

    elements_per_thread: int
    num_warps: int
    vector: int
    pieces: int = 4
    max_registers: int | None = None

    def tile(self, block: int) -> int:
        return max(block, self.elements_per_thread * self.num_warps * 32)

    def shapes(self, fmt: DeviceFormat) -> tuple[TileShape, TileShape]:
        """Shapes of a whole tile, and of the pieces in which a masked one is processed."""
        rows = self.tile(fmt.block) // fmt.block
        return self._shape(fmt, rows), self._shape(fmt, max(1, rows // self.pieces))

    def options(self) -> dict[str, object]:
        """Options of the compiler."""
        limited = self.max_registers is not None and torch.version.hip is None
        limit = {"maxnreg": self.max_registers} if limited else {}
        return {"num_warps": self.num_warps, "enable_fp_fusion": False, **limit}

    def _shape(self, fmt: DeviceFormat, rows: int) -> TileShape:
        per_thread = max(1, rows * fmt.length // (self.num_warps * 32))
        return TileShape(rows, self.vector, max(1, fmt.length // min(self.vector, per_thread)))


class How(NamedTuple):
    """Other properties for which an encoder is compiled: rounding at random."""

    stochastic: bool = False
    stochastic_residual: bool = False


def encode_launch(
    fmt: DeviceFormat,
    residual: torch.dtype | None = None,
    how: How = How(),  # noqa: B008 (immutable)
) -> Launch:
    """Derived from registers and bytes in flight (docs/kernels.md). `benchmarks/gpu_kernels.py --sweep` checks it."""
    dithered = how.stochastic_residual
    if residual == torch.float32:  # 16-byte stores of the residual
        return Launch(elements_per_thread=4 * max(4, fmt.parts), num_warps=4, vector=4)
    if fmt.parts == 1:
        return Launch(elements_per_thread=16, num_warps=4, vector=16)
    if dithered and len(fmt.codebook) > 0 and fmt.parts < 8:  # hashes and the codebook need every register
        return Launch(elements_per_thread=16, num_warps=4, vector=16 // fmt.parts)
    fits = 96 if fmt.words and not dithered else None
    return Launch(elements_per_thread=32, num_warps=4, vector=32 // fmt.parts, max_registers=fits)


def decode_launch(fmt: DeviceFormat) -> Launch:
    """Loads of up to 16 bytes of codes per thread: eight ranks' loads, one instruction each, are in flight at once."""
    return Launch(elements_per_thread=32, num_warps=4, vector=min(16, 32 // fmt.parts), pieces=8)
