"""1-bit SGD: one bit per element, decoded to the mean of each sign."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.integers import BITS
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.residuals import ResidualDtype
from lowbit_strategy.methods.efsignsgd import EFSignSGD
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec
from lowbit_strategy.options.configuration import configuration

_MEAN_NBYTES = 4  # both means, bfloat16


@dataclass(frozen=True, slots=True)
class TwoMeansCodec(BlockwiseCodec):
    """`OneBitSGD`'s quantizer: the 1-bit code of least squared error that splits a block at 0."""

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
        return torch.cat([BITS.pack(positive_KB.byte()), means_K2.view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        means_K2 = self.trailer(payload_KC, _MEAN_NBYTES, torch.bfloat16).float()
        positive_KB = BITS.unpack(payload_KC[:, :-_MEAN_NBYTES]).bool()
        return torch.where(positive_KB, means_K2[:, 1:], means_K2[:, :1])


@configuration
class OneBitSGD(EFSignSGD):
    """One bit per element, which decodes to the mean of the elements that have it, with error feedback on both hops.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``h = g + e``
    2. send the bits ``h >= 0``, eight to a byte, and the means of the negative and the other elements
    3. ``e' = h - Q``

    Args:
        block_size: Elements that share two means (bfloat16), a power of two; a column in the publication.

    References:
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
        Speech DNNs", Interspeech 2014, section 3.
    """

    name: ClassVar[str] = "onebitsgd"

    block_size: int = 512
    residual: ResidualDtype = "float32"

    def method(self, spec: TensorSpec) -> CodecPair:
        return self._with_feedback(TwoMeansCodec(self.block_size))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return self._with_feedback(BlockCodec(uniform(self.high_precision_bits, self.block_size)))

    def _with_feedback(self, codec: Codec) -> CodecPair:
        stateful = FeedbackCodec(codec=codec, residual=self.residual)
        return CodecPair(stateful)
