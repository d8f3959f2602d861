"""Blockwise codes with one scale per block, made by the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, StateTensors, StepContext
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.reference import blocks as reference
from lowbit_strategy.kernels.reference.rng import dither
from lowbit_strategy.kernels.segments import Segments

Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, slots=True)
class BlockCodec(BucketCodec):
    """Encodes blocks as codes and scales in the format `fmt`.

    Args:
        fmt: Bits, block size, scale rule and codebook.
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

    def decoded(self, x_N: Tensor) -> Tensor:
        """Encode and decode with the reference, without building or compiling a kernel."""
        x_KB, count_K = x_N.view(-1, self.block_size), torch.full((1,), self.block_size, dtype=torch.int64)
        scale_K, _ = reference.block_scale(x_KB, count_K.expand(len(x_KB)), self.fmt)
        noise_N = dither(0, x_N.numel(), 0, x_N.device) if self.rounding == "stochastic" else torch.zeros_like(x_N)
        codes_KB = reference.quantize(x_KB, scale_K, self.fmt, noise_N.view_as(x_KB))
        return reference.dequantize(codes_KB, scale_K, self.fmt).view(-1)

    def wire_nbytes(self, numel: int) -> int:
        return self.fmt.wire_nbytes(numel)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        encode_(x, wire, segments, self.fmt, flag=flag, stochastic=self.rounding == "stochastic", seed=step.seed)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        decode_sum_(wire_WB, out, segments, self.fmt, alpha=alpha)
