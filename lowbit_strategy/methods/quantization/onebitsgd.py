"""1-bit SGD: signs with two means, error feedback."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.onebit import TwoMeansCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.base import Compressor, LanePair
from lowbit_strategy.methods._base.feedback import FeedbackLane, ResidualDtype
from lowbit_strategy.methods._base.option_checks import check_bits, check_block_size, check_choice
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class OneBitSGD(Compressor):
    """One bit an element; each of its two values decodes to the mean of what it stands for. Error feedback both ways.

    For each block, on every rank, and again at the owner for the mean (DDP):

    1. ``h = g + e``
    2. send the bits ``h >= 0``, eight to a byte, and the means of the negative and of the other elements
    3. ``e' = h - Q``

    Args:
        block_size: Elements that share two means (bfloat16), a power of two; the publication has two a column.
        residual: ``float32`` costs 4 bytes a parameter and keeps the error exactly; ``int8`` costs 1.
        milder_bits: Of embeddings and output heads.
        exempt, milder: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
        Speech DNNs", Interspeech 2014, section 3.
    """

    name: ClassVar[str] = "onebitsgd"

    block_size: int = 512
    residual: ResidualDtype = "float32"
    milder_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_block_size(self.block_size)
        check_choice("residual", self.residual, ("float32", "int8"))
        check_bits("milder_bits", self.milder_bits)

    def conserving(self) -> OneBitSGD:
        return replace(self, residual="float32")

    def _lanes(self, codec: Codec) -> LanePair:
        lane = FeedbackLane(codec=codec, residual=self.residual)
        return LanePair(lane, lane)

    def method(self, spec: TensorSpec) -> LanePair:
        return self._lanes(TwoMeansCodec(self.block_size))

    def milder_method(self, spec: TensorSpec) -> LanePair:
        return self._lanes(BlockCodec(uniform(self.milder_bits, self.block_size)))
