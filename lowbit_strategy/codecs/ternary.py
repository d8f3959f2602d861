"""TernGrad's quantiser: trits drawn at random, five to a byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit_strategy.codecs.block import Rounding
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise, trailer
from lowbit_strategy.kernels.integers import pack_integers, packed_nbytes, unpack_integers
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.reference.rng import CODE_STREAM

_SCALER_NBYTES = 4


@dataclass(frozen=True, slots=True)
class TernaryCodec(BlockwiseCodec):
    """For every block g:

    1. clip at `clip_sigmas` standard deviations
    2. the scaler is ``s = max|g|``, float32
    3. ``sign(g)`` with probability ``|g| / s``, else 0

    Fields as in `TernGrad`. With `rounding` ``nearest`` it is 0 below half of s.
    """

    block_size: int = 1024
    clip_sigmas: float | None = 2.5
    rounding: Rounding = "stochastic"

    def nearest(self) -> TernaryCodec:
        return replace(self, rounding="nearest")

    @property
    def label(self) -> str:
        return f"trits, blocks of {self.block_size}"

    @property
    def block_nbytes(self) -> int:
        return packed_nbytes(self.block_size, 1) + _SCALER_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        scaler_K = clipped_absmax(h_KB, valid_KB.sum(-1), self.clip_sigmas)
        positive_K = scaler_K >= torch.finfo(torch.float32).tiny
        y_KB = torch.where(positive_K[:, None], h_KB / torch.where(positive_K, scaler_K, 1.0)[:, None], 0.0)
        if self.rounding == "stochastic":
            y_KB = y_KB + noise(CODE_STREAM)
        trits_KB = y_KB.round().clamp(-1, 1).int()
        scaler_K = torch.where(finite_K, torch.where(positive_K, scaler_K, 0.0), torch.nan)
        return torch.cat([pack_integers(trits_KB, 1), scaler_K[:, None].view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        scaler_K1 = trailer(payload_KC, _SCALER_NBYTES, torch.float32)
        return unpack_integers(payload_KC[:, :-_SCALER_NBYTES], self.block_size, 1) * scaler_K1


def clipped_absmax(h_KB: Tensor, counts_K: Tensor, clip_sigmas: float | None) -> Tensor:
    """float32 [K]: largest magnitude of zero-padded blocks after clipping at so many standard deviations."""
    absmax_K = h_KB.abs().amax(-1)
    if clip_sigmas is None:
        return absmax_K
    unit_KB = torch.where(absmax_K[:, None] > 0, h_KB / absmax_K[:, None], 0.0)  # squares neither overflow nor vanish
    mean_K = tree_sum(unit_KB) / counts_K
    variance_K = (tree_sum(unit_KB * unit_KB) / counts_K - mean_K * mean_K).clamp(min=0.0)
    # A block of equal elements has no deviation but is no outlier either: never clip below its mean.
    bound_K = torch.maximum(clip_sigmas * variance_K.sqrt(), mean_K.abs())
    return torch.minimum(absmax_K, bound_K * absmax_K)
