"""Weights as blockwise codes, made anew in every step."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods.weights.base import BlockWeights, Keep
from lowbit_strategy.options.configuration import configuration


@configuration
class WeightCode(BlockWeights):
    """Blockwise codes of the owners' shards.

    1. owner: each block of its shard becomes ``block_size`` codes and one scale, the largest magnitude over
       ``2**(bits-1) - 1``, rounded to the nearest code
    2. one all-gather of bytes per sharded module and optimizer step
    3. every rank, the owner too, decodes the same bytes straight into the weights that the module computes with

    The error of a step does not reach the next one: the owner's shard is exact, and the codes are made from it anew.
    Blocks without an element of at least 1.5e-36 (8 bits; 8.3e-38 for 4) decode as zeros: their scale would be below
    the smallest normal number.

    Args:
        bits: A code has so many: 8, 6 or 4. 8 is not seen in the loss; fewer are (`WeightDelta` costs as few bytes).
        keep: What a rank keeps until the next step, so that backward and further micro-batches send nothing.
            ``codes``: 1 byte per parameter at 8 bits; decoded again in each gather. ``replica``: the decoded weights
            in the type that the forward runs in (2 or 4 bytes per parameter). ``nothing``: FSDP2's own memory, and
            every gather sends.
        exempt: Parameters that travel exactly, in the same message: as for a compressor's `exempt`.
        high_precision: Parameters that have at least `high_precision_bits`.
        high_precision_bits: 8, 6, 5 or 4.
        block_size: Elements that share a scale: a power of two from 32 to 4,096.

    Raises:
        ValueError: A field is out of range.

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
