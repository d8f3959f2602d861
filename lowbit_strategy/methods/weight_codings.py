"""How FSDP2's weights are sent from their owners to the other ranks: exactly, as codes, or as codes of differences.

Each rank owns a shard of every parameter, and all ranks gather all shards before a module runs. The owner's shard stays
exact, so the optimizer, checkpoints and evaluation see exact weights. In training all ranks, including the owner,
compute with the decoded weights.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.selectors import Selector, matching, validate_selectors
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import register_other_names
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import Mismatch, call, convert, named, register_conversion

Keep = Literal["nothing", "codes", "replica"]


@configuration
class WeightCoding(ABC):
    """Base class of ways to send weights: `Exact`, `WeightCode`, `WeightDelta`."""

    name: ClassVar[str]
    sends_differences: ClassVar[bool] = False

    keep: Keep = "nothing"

    @abstractmethod
    def codec(self, spec: TensorSpec) -> Codec | None:
        """The codec of one parameter; None: it is sent exactly."""

    @property
    @abstractmethod
    def label(self) -> str:
        """A few words for reports."""


@configuration
class BlockWeights(WeightCoding):
    """Base class of blockwise codes whose bits depend on a parameter's role.

    Args:
        exempt: Parameters that are sent exactly, in the same message; chosen like a compressor's `exempt`.
        high_precision: Parameters that have at least `high_precision_bits`.
        high_precision_bits: 8, 6, 5 or 4.
        block_size: Elements that share a scale: a power of two from 32 to 4,096.
    """

    exempt: tuple[Selector, ...] = ("@vector", "@small")
    high_precision: tuple[Selector, ...] = ("@embedding", "@head")
    high_precision_bits: int = 8
    block_size: int = 128
    bits: int  # for parameters that are neither exempt nor high-precision
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


@configuration
class Exact(WeightCoding):
    """Sends weights like FSDP2: every element in the dtype of the forward pass.

    Args:
        keep: ``nothing``: weights are gathered in forward and again in backward, for every micro-batch, as in FSDP2.
            ``replica``: weights are gathered once per optimizer step and kept until the next one. This halves the
            bytes, or saves more with gradient accumulation, and costs a whole copy of the weights on every rank.
    """

    name: ClassVar[str] = "exact"

    def __post_init__(self) -> None:
        if self.keep == "codes":
            raise ValueError("exact weights have no codes to keep: keep must be 'nothing' or 'replica', got 'codes'")

    @property
    def label(self) -> str:
        return "exact"

    def codec(self, spec: TensorSpec) -> Codec | None:
        return None


@configuration
class WeightCode(BlockWeights):
    """Sends blockwise codes of the owners' shards.

    1. owner: each block of its shard becomes ``block_size`` codes and one scale, the largest magnitude over
       ``2**(bits-1) - 1``, rounded to the nearest code
    2. one all-gather of bytes per sharded module and optimizer step
    3. every rank, including the owner, decodes the same bytes directly into the weights that the module computes with

    Errors do not accumulate, because each step's codes are made from the owner's exact shard. Blocks whose elements are
    all below 1.5e-36 (8 bits; 8.3e-38 for 4) decode as zeros, since their scale would be below the smallest normal
    number.

    Args:
        bits: Bits per code: 8, 6 or 4. 8 bits do not show in the loss; fewer do, so use `WeightDelta` then.
        keep: What a rank keeps until the next step, so that backward and further micro-batches send nothing. ``codes``:
            1 byte per parameter at 8 bits, decoded again in each gather. ``replica``: the decoded weights in the dtype
            of the forward pass (2 or 4 bytes per parameter). ``nothing``: no extra memory, but every gather sends.

    References:
        The blockwise weight all-gather of ZeRO++: Wang et al., "ZeRO++: Extremely Efficient Collective Communication
        for Giant Model Training", 2023, arXiv 2306.10209, section 3.1 (its gather in backward is exact; here both
        passes compute with the same weights).
    """

    name: ClassVar[str] = "code"
    allowed_bits: ClassVar[tuple[int, ...]] = (8, 6, 4)

    bits: int = 8
    keep: Keep = "codes"

    @property
    def label(self) -> str:
        return f"{self.bits}-bit codes"


@configuration
class WeightDelta(BlockWeights):
    """Sends differences, for which a few bits suffice: the error of one step's code is part of the next difference.

    All ranks keep the same replica h of the weights, in the dtype of the forward pass.

    1. in the first step the owners send their shards x exactly: ``h = x``
    2. then, once per optimizer step, each owner codes ``c = C(x - h)`` for its shard, with the blockwise code C of
       `WeightCode`
    3. one all-gather of the codes c of all owners per sharded module
    4. every rank, including the owner, adds ``h += c``; the module computes with h

    A forward pass between backward and an optimizer's step codes 0, so h stays. If a weight is NaN, its block is NaN on
    all ranks in that step, and differences start from 0 in the next.

    Errors do not accumulate: ``|x - h|`` is C's error of one difference, and differences are as small as the
    optimizer's steps. A checkpoint contains each owner's part of h; after a resume these parts are sent once, exactly.

    Args:
        bits: Bits per code: 8, 4 or 2.
        keep: Only ``replica``: 4 bytes per parameter on every rank, 2 if the forward pass is in 16 bits.
        high_precision: Parameters that have at least `high_precision_bits`. There are none by default, since the
            replica corrects their errors too.

    References:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
        Feedback", 2021, arXiv 2106.05203, equation 11, here of weights; Jia et al., "SDP4Bit: Toward 4-bit
        Communication Quantization in Sharded Data Parallelism for LLM Training", 2024, arXiv 2410.15526, section 3.1
        (whose differences are of successive weights, without the earlier error).
    """

    name: ClassVar[str] = "delta"
    allowed_bits: ClassVar[tuple[int, ...]] = (8, 4, 2)
    sends_differences: ClassVar[bool] = True

    high_precision: tuple[Selector, ...] = ()
    bits: int = 4
    keep: Keep = "replica"

    def __post_init__(self) -> None:
        BlockWeights.__post_init__(self)
        if self.keep != "replica":
            raise ValueError(
                f"WeightDelta adds differences to a replica of the weights: keep must be 'replica', got {self.keep!r}."
                " For less memory use WeightCode"
            )

    @property
    def label(self) -> str:
        return f"{self.bits}-bit codes of differences"


WEIGHTS: dict[str, type[WeightCoding]] = {"exact": Exact, "code": WeightCode, "delta": WeightDelta}

register_other_names(WEIGHTS, "it is a way of sending weights, weights={!r} with a compressor (FSDP2)")


def default_weights(compressor: Compressor) -> WeightCoding:
    """The default: 8 bits with LoCo, otherwise exact, since coded weights have only been measured with LoCo."""
    return WeightCode() if isinstance(compressor, LoCo) else Exact()


def as_weights(value: object) -> WeightCoding:
    """Return an `Exact`, `WeightCode` or `WeightDelta`, given one, a name such as ``"delta4"``, or a mapping.

    Raises:
        ValueError: `value` is none of these, or has an unknown name or option.
    """
    return convert(value, WeightCoding, "weights")  # type: ignore[type-abstract]


def _make(value: Any) -> WeightCoding:
    """Make one from ``code``, ``code8``, ``{name: delta, bits: 4}``."""
    if isinstance(value, str):
        name, digits = re.fullmatch(r"(.*?)(\d*)", value.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        value = {"name": name, "bits": int(digits)} if digits else {"name": name}
    if not (isinstance(value, Mapping) and isinstance(name := value.get("name"), str)):
        raise Mismatch
    plain = {**value, "name": re.sub("(?i)^weight", "", name)}
    coding, options = named(plain, WEIGHTS, "way of sending weights")
    return call(coding, options)


register_conversion(
    WeightCoding,
    _make,
    "a coding of weights such as WeightDelta(bits=4), 'exact', 'code8', 'delta4' or {name: delta, bits: 4}",
    known=lambda: [coding() for coding in WEIGHTS.values()],
)
