"""What every way of sending weights has in common: which parameters it codes, and what ranks keep of what they receive.

Under FSDP2 each rank owns a shard of every parameter, and all ranks gather all shards before a module runs. The owner's
shard stays exact, whatever travels: the optimizer, checkpoints and evaluation see exact weights, and in training all
ranks, the owner too, compute with what the others decode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.parameter_selectors import Selector, matching, validate_selectors
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration

Keep = Literal["nothing", "codes", "replica"]


@configuration
class WeightCoding(ABC):
    """A way of sending weights; one of `Exact`, `WeightCode`, `WeightDelta`."""

    name: ClassVar[str]
    sends_differences: ClassVar[bool] = False

    keep: Keep = "nothing"

    @abstractmethod
    def codec(self, spec: TensorSpec) -> Codec | None:
        """The code of one parameter; None: it travels as it is."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for reports."""


@configuration
class BlockWeights(WeightCoding):
    """What the blockwise codes share: bits by a parameter's role."""

    exempt: tuple[Selector, ...] = ("@vector", "@small")
    high_precision: tuple[Selector, ...] = ("@embedding", "@head")
    high_precision_bits: int = 8
    block_size: int = 128
    bits: int  # of a parameter that is neither exempt nor of high precision
    allowed_bits: ClassVar[tuple[int, ...]]

    def __post_init__(self) -> None:
        validate_selectors("exempt", self.exempt)
        validate_selectors("high_precision", self.high_precision)
        for field, allowed in (("high_precision_bits", (8, 6, 5, 4)), ("bits", self.allowed_bits)):
            if (bits := getattr(self, field)) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(map(str, allowed))}, got {bits!r}")
        uniform(8, self.block_size)

    def codec(self, spec: TensorSpec) -> Codec | None:
        if matching(self.exempt, spec) is not None:
            return None
        high = matching(self.high_precision, spec) is not None
        bits = max(self.bits, self.high_precision_bits) if high else self.bits
        return BlockCodec(uniform(bits, self.block_size))
