"""Signs, eight to a byte, with the means of the negative and of the other elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise, trailer
from lowbit_strategy.kernels.reference.blocks import tree_sum

_MEAN_NBYTES = 4  # both means, bfloat16


@dataclass(frozen=True, slots=True)
class TwoMeansCodec(BlockwiseCodec):
    """1-bit SGD's quantiser: of the 1-bit codes of a block that split it at 0, the one with the least squared error.

    1. the bit says whether ``h >= 0``
    2. it decodes to the mean of the block's elements that share it
    """

    block_size: int = 512

    @property
    def label(self) -> str:
        return f"1-bit, two means per block of {self.block_size}"

    @property
    def block_nbytes(self) -> int:
        return self.block_size // 8 + _MEAN_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        positive_KB = h_KB >= 0
        means = []
        for part_KB in (valid_KB & ~positive_KB, valid_KB & positive_KB):
            count_K = part_KB.sum(-1).clamp(min=1)
            means.append(tree_sum(torch.where(part_KB, h_KB, 0.0) / count_K[:, None]))
        means_K2 = torch.stack(means, 1)
        means_K2 = torch.where(finite_K[:, None], means_K2, torch.nan).to(torch.bfloat16)
        return torch.cat([pack_bits(positive_KB), means_K2.view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        means_K2 = trailer(payload_KC, _MEAN_NBYTES, torch.bfloat16).float()
        positive_KB = unpack_bits(payload_KC[:, :-_MEAN_NBYTES])
        return torch.where(positive_KB, means_K2[:, 1:], means_K2[:, :1])


def pack_bits(bits_KB: Tensor) -> Tensor:
    """uint8 [K, B / 8]: byte j holds elements j, j + B/8, j + 2B/8 ..."""
    parts = bits_KB.to(torch.uint8).view(bits_KB.shape[0], 8, -1)
    packed = parts[:, 0].clone()
    for k in range(1, 8):
        packed |= parts[:, k] << k
    return packed


def unpack_bits(packed_KC: Tensor) -> Tensor:
    """Boolean [K, 8 C]."""
    return torch.cat([(packed_KC >> k) & 1 for k in range(8)], 1).bool()
