"""Blockwise codes with one scale per block, made by the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, StateTensors, StepContext
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import BlockFormat
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

    def wire_nbytes(self, numel: int) -> int:
        return self.fmt.wire_nbytes(numel)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        encode_(x, wire, segments, self.fmt, flag=flag, stochastic=self.rounding == "stochastic", seed=step.seed)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        decode_sum_(wire_WB, out, segments, self.fmt, alpha=alpha)
