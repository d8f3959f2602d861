"""Codes of one block after the other: with one scale each through the fused kernels, in plain PyTorch, or rotated."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, Codec
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.reference import blocks as reference
from lowbit_strategy.kernels.reference.rng import dither
from lowbit_strategy.kernels.rotation import rotate
from lowbit_strategy.kernels.segments import Segments

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class BlockCodec(BucketCodec):
    """Codes and scales as `fmt` says.

    Args:
        fmt: Bits, block size, scale rule, codebook.
        rounding: ``nearest``: least error; ``stochastic``: unbiased, twice the variance (uniform grids only).
    """

    in_one_pass: ClassVar[bool] = True

    fmt: BlockFormat
    rounding: Rounding = "nearest"

    @property
    def label(self) -> str:
        return f"{self.fmt.bits}-bit blocks of {self.fmt.block_size}"

    @property
    def block_size(self) -> int:
        return self.fmt.block_size

    def nearest(self) -> BlockCodec:
        if self.fmt.bits == 1 and self.fmt.scale_rule == "rms":  # in every block signs fit best at its mean
            return BlockCodec(replace(self.fmt, scale_rule="mean_abs", codebook=(-1.0, 1.0)))
        return replace(self, rounding="nearest")

    def decoded(self, x_N: Tensor) -> Tensor:
        """By the definition: no kernel is built or compiled for it."""
        x_KB, count_K = x_N.view(-1, self.block_size), torch.full((1,), self.block_size, dtype=torch.int64)
        scale_K, _ = reference.block_scale(x_KB, count_K.expand(len(x_KB)), self.fmt)
        noise_N = dither(0, x_N.numel(), 0, x_N.device) if self.rounding == "stochastic" else torch.zeros_like(x_N)
        codes_KB = reference.quantize(x_KB, scale_K, self.fmt, noise_N.view_as(x_KB))
        return reference.dequantize(codes_KB, scale_K, self.fmt).view(-1)

    def wire_nbytes(self, numel: int) -> int:
        return self.fmt.wire_nbytes(numel)

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        encode_(x, wire, segments, self.fmt, flag=flag, stochastic=self.rounding == "stochastic", seed=seed)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        decode_sum_(wire_WB, out, segments, self.fmt, alpha=alpha)


Noise = Callable[[int], Tensor]  # stream -> float32 [K, B], uniform in [-0.5, 0.5)


class BlockwiseCodec(BucketCodec):
    """Every block of ``block_size`` elements becomes ``block_nbytes`` bytes; one pass over a whole bucket.

    A subclass codes and decodes [K, B] blocks. Blocks with inf or NaN arrive as zeros with ``finite_K`` False and must
    decode to NaN.
    """

    @property
    @abstractmethod
    def block_nbytes(self) -> int:
        """Bytes of a block."""

    @abstractmethod
    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        """uint8 [K, block_nbytes] of float32 blocks; `valid_KB` is False on padding, whose values are zero."""

    @abstractmethod
    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        """float32 [K, B]."""

    def wire_nbytes(self, numel: int) -> int:
        return -(-numel // self.block_size) * self.block_nbytes

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        packed = pack_segments(segments, self.block_size)
        if not packed.numel:
            return
        h_KB = packed.collect(x).view(-1, self.block_size)
        finite_K = h_KB.isfinite().all(-1)
        h_KB = torch.where(finite_K[:, None], h_KB, 0.0)
        payload_KC = self.encode_blocks(
            h_KB, packed.valid(x.device), finite_K, lambda stream: packed.noise(seed, stream, x.device)
        )
        packed.store_wire_(wire, payload_KC)
        flag |= (~finite_K.all()).to(flag.dtype)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        total = functools.reduce(Tensor.add_, self.decode_rows(wire_WB, segments))
        pack_segments(segments, self.block_size).spread_(total.mul_(alpha), out)

    def decode_rows(self, wire_WB: Tensor, segments: Segments) -> Iterator[Tensor]:
        """What each source has sent, decoded and packed, in rank order."""
        packed = pack_segments(segments, self.block_size)
        for wire in wire_WB:
            yield self.decode_blocks(packed.collect_wire(wire, self.block_nbytes)).reshape(-1)


def trailer(payload_KC: Tensor, nbytes: int, dtype: torch.dtype) -> Tensor:
    """The last bytes of every block as numbers, [K, ...]; a copy, since views need aligned offsets and strides."""
    return payload_KC[:, -nbytes:].clone(memory_format=torch.contiguous_format).view(dtype)


Transform = Literal["hadamard", "cosine"]
DENSE_BLOCK = 128  # rotated together where the codec itself has no blocks


@dataclass(frozen=True, slots=True)
class RotatedCodec(BucketCodec):
    """``codec`` on ``H D x / sqrt(n)``, block by block; the sum of what all ranks send is rotated back once.

    ``H`` is the Hadamard matrix of n = `size` elements, ``D`` fixed random signs, so that a constant block is spread
    as well. The rotation keeps lengths: the error is the inner codec's error of a block that looks Gaussian.

    Args:
        codec: Encodes the rotated blocks.
        size: Elements rotated together, a power of two that divides the codec's block size; None takes the block size.
        transform: ``cosine`` is the discrete cosine transform instead of ``H D``: smooth rows become few large
            coefficients, which is what selection wants and the opposite of what a grid does.

    Raises:
        ValueError: `size` does not fit.
    """

    codec: Codec
    size: int | None = None
    transform: Transform = "hadamard"

    def __post_init__(self) -> None:
        size, block_size = self.rotation_size, self.block_size
        if not isinstance(size, int) or size < 2 or size & (size - 1) or block_size % size:
            raise ValueError(f"size must be a power of two that divides the block size {block_size}, got {size!r}")

    @property
    def block_size(self) -> int:
        return self.codec.block_size if self.codec.block_size > 1 else DENSE_BLOCK

    @property
    def rotation_size(self) -> int:
        return self.block_size if self.size is None else self.size

    @property
    def label(self) -> str:
        how = "rotated by" if self.transform == "hadamard" else "cosines of"
        return f"{self.codec.label}, {how} {self.rotation_size}"

    def nearest(self) -> RotatedCodec:
        return replace(self, codec=self.codec.nearest())

    @property
    def contracts(self) -> bool:
        return self.codec.contracts  # a rotation keeps lengths

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(-(-numel // self.block_size) * self.block_size)

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        packed = pack_segments(segments, self.block_size)
        rotated = self._transformed(packed.collect(x))
        self.codec.encode_segments_(rotated, wire, packed.padded_segments, seed=seed, flag=flag)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        packed = pack_segments(segments, self.block_size)
        rotated = torch.empty(packed.numel, dtype=torch.float32, device=out.device)
        self.codec.decode_sum_segments_(wire_WB, rotated, packed.padded_segments, alpha=alpha)
        packed.spread_(self._transformed(rotated, inverse=True), out)

    def _transformed(self, x_N: Tensor, *, inverse: bool = False) -> Tensor:
        transform = cosines if self.transform == "cosine" else rotate
        return transform(x_N.view(-1, self.rotation_size), inverse=inverse).view(-1)


def cosines(x_KN: Tensor, *, inverse: bool) -> Tensor:
    """Orthonormal discrete cosine transform (type II) of the rows, or its inverse. Added up in order: the same bits for
    any K.
    """
    matrix = _cosine_matrix(x_KN.shape[1], x_KN.device)
    rows = matrix if inverse else matrix.T
    y = torch.zeros_like(x_KN)
    for n in range(x_KN.shape[1]):
        y.addcmul_(x_KN[:, n, None], rows[n])
    return y


@functools.cache
def _cosine_matrix(size: int, device: torch.device) -> Tensor:
    """float32 [frequency, place], the same numbers on every device."""
    place, frequency = torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    matrix = (math.pi / size * (place + 0.5) * frequency).cos() * (2 / size) ** 0.5
    matrix[0] *= 0.5**0.5
    return matrix.float().to(device)
