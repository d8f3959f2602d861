"""Codes of one block after the other: with one scale each through the fused kernels, or in plain PyTorch."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, contracts
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.reference import blocks as reference
from lowbit_strategy.kernels.reference.rng import dither
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

    @property
    def contracts(self) -> bool:
        if self.rounding == "nearest" and (self.fmt.is_uniform or self.fmt.codebook == (-1.0, 0.0, 1.0)):
            return True  # no element's error is larger than the element
        return contracts(functools.partial(_decoded, self.fmt, self.rounding), self.block_size)

    def wire_nbytes(self, numel: int) -> int:
        return self.fmt.wire_nbytes(numel)

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        encode_(x, wire, segments, self.fmt, flag=flag, stochastic=self.rounding == "stochastic", seed=seed)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        decode_sum_(wire_WB, out, segments, self.fmt, alpha=alpha)


def _decoded(fmt: BlockFormat, rounding: Rounding, x_N: Tensor) -> Tensor:
    """What the others decode of one block, by the definition: no kernel is built or compiled for it."""
    x_KB, count_K = x_N.view(1, -1), torch.full((1,), fmt.block_size, dtype=torch.int64)
    scale_K, _ = reference.block_scale(x_KB, count_K, fmt)
    noise_KB = dither(0, fmt.block_size, 0, x_N.device) if rounding == "stochastic" else 0.0
    codes_KB = reference.quantize(x_KB, scale_K, fmt, noise_KB)
    return reference.dequantize(codes_KB, scale_K, fmt).view(-1)


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
