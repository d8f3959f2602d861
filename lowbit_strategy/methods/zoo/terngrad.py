"""TernGrad: unbiased trits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.block import BlockCodec, Rounding
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise, trailer
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.integers import pack_integers, packed_nbytes, unpack_integers
from lowbit_strategy.kernels.reference.rng import CODE_STREAM
from lowbit_strategy.methods._base.compressor import Compressor, check_codes
from lowbit_strategy.methods._base.method import CodecPair, Method
from lowbit_strategy.methods.zoo.sharedscale import SharedScaleReducer, clipped_absmax
from lowbit_strategy.options.configuration import configuration

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


Scaler = Literal["shared", "rank"]


@configuration
class TernGrad(Compressor):
    """Gradients as -1, 0 and 1 times a scaler, rounded without bias.

    For each block, on every rank:

    1. clip at `clip_sigmas` standard deviations of the rank's own block
    2. ``s = max|g|``; with ``scaler="shared"`` the largest of all ranks' (an all-reduce of one float per block)
    3. ``s * sign(g)`` with probability ``|g| / s``, else 0; five trits to a byte, 1.6 bits per element
    4. shared: trits are summed as integers and sent back exactly, with the bits that ``-W ... W`` needs: nothing is
       quantized twice. Per rank: the owner sends the mean back in `return_bits`, rounded without bias.

    Unbiased except for the clipping. The variance is large: use large batches or small learning rates.

    Args:
        block_size: Elements that share a scaler and a clipping bound, a power of two; a layer in the publication.
        clip_sigmas: Smaller: less variance, more bias. None: no clipping.
        scaler: One ``shared`` by all ranks, or one per ``rank``.
        return_bits: With a scaler per rank, per code on the downlink (DDP), 2 to 8.
        high_precision_bits: Per code of embeddings and output heads.

    References:
        Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017,
        arXiv 1705.07878, algorithm 1 and sections 3.3 (layer-wise ternarizing, gradient clipping, scaler sharing).
    """

    name: ClassVar[str] = "terngrad"

    block_size: int = 1024
    clip_sigmas: float | None = 2.5
    scaler: Scaler = "shared"
    return_bits: int = 8
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_codes(self.block_size, return_bits=self.return_bits, high_precision_bits=self.high_precision_bits)
        if self.clip_sigmas is not None and not self.clip_sigmas > 0:
            raise ValueError(f"clip_sigmas must be positive or None, got {self.clip_sigmas!r}")

    def method(self, spec: TensorSpec) -> Method:
        if self.scaler == "shared":
            return SharedScaleReducer(
                limit=1, block_size=self.block_size, clip_sigmas=self.clip_sigmas, title="shared trits"
            )
        downlink = BlockCodec(uniform(self.return_bits, self.block_size), "stochastic")
        return CodecPair(TernaryCodec(self.block_size, self.clip_sigmas), downlink)

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(BlockCodec(uniform(self.high_precision_bits, self.block_size), "stochastic"))
