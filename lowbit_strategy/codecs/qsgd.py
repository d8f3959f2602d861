"""QSGD's quantizer: unbiased, on an even grid between minus and plus the norm of a bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise, trailer
from lowbit_strategy.kernels.format import SCALE_NBYTES, BlockFormat, uniform
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import CODE_STREAM

Norm = Literal["max", "l2"]


@dataclass(frozen=True, slots=True)
class L2Codec(BlockwiseCodec):
    """QSGD with the Euclidean norm. (With the maximum norm it is `BlockCodec` with stochastic rounding.)

    For a bucket v, with ``s = 2**(bits-1) - 1``:

    1. the scale is ``|v|_2 / s``, rounded up to bfloat16
    2. each ``v_i / scale`` is rounded to one of the two neighboring integers at random, without bias
    3. codes packed, then the scale

    Fields as in `QSGD`.
    """

    bits: int = 4
    block_size: int = 128

    @property
    def label(self) -> str:
        return f"qsgd {self.bits}-bit, L2 norm, buckets of {self.block_size}"

    def nearest(self) -> Codec:
        """With the maximum norm: the grid of the Euclidean one is so coarse at few bits that a block rounds to 0."""
        return BlockCodec(self.fmt)

    @property
    def fmt(self) -> BlockFormat:
        return uniform(self.bits, self.block_size)

    @property
    def block_nbytes(self) -> int:
        return self.fmt.code_nbytes + SCALE_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        fmt = self.fmt
        absmax_K = h_KB.abs().amax(-1)
        unit_KB = h_KB / torch.where(absmax_K > 0, absmax_K, 1.0)[:, None]  # squares neither overflow nor vanish
        norm_K = blocks.tree_sum(unit_KB * unit_KB).sqrt() * absmax_K
        scale_K = blocks.round_up_bfloat16(norm_K * torch.tensor(1.0 / fmt.qmax, dtype=torch.float32))
        scale_K = torch.where(scale_K < torch.finfo(torch.float32).tiny, 0.0, scale_K)
        scale_K = torch.where(finite_K & scale_K.isfinite(), scale_K, torch.nan)
        codes_KB = blocks.quantize(h_KB, scale_K, fmt, noise(CODE_STREAM))
        scale_bytes = blocks.to_bfloat16(scale_K)[:, None].view(torch.uint8)
        return torch.cat([blocks.pack(codes_KB, fmt), scale_bytes], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        fmt = self.fmt
        scale_K = trailer(payload_KC, SCALE_NBYTES, torch.bfloat16)[:, 0].float()
        return blocks.dequantize(blocks.unpack(payload_KC[:, :-SCALE_NBYTES], fmt), scale_K, fmt)
