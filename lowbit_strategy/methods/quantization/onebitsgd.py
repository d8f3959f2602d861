"""1-bit SGD: signs with two means, error feedback."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.onebit import TwoMeansCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._residual_rules.feedback import FeedbackCodec, ResidualDtype
from lowbit_strategy.methods.quantization.efsignsgd import EFSignSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class OneBitSGD(EFSignSGD):
    """One bit per element; each of its two values decodes to the mean of what it stands for. Error feedback both ways.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``h = g + e``
    2. send the bits ``h >= 0``, eight to a byte, and the means of the negative and of the other elements
    3. ``e' = h - Q``

    Args:
        block_size: Elements that share two means (bfloat16), a power of two; the publication has two per column.
        residual, high_precision_bits: See `EFSignSGD`.
        exempt, high_precision: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

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
        return CodecPair(stateful, stateful)
