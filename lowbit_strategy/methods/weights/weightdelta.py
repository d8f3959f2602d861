"""Codes of the difference between a shard and what the other ranks have of it."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods.weights.base import BlockWeights, Keep
from lowbit_strategy.options.configuration import configuration


@configuration
class WeightDelta(BlockWeights):
    """Differences travel, so that a few bits are enough: what one step's code leaves out is in the next difference.

    All ranks keep the same replica h of the weights, in the type that the forward runs in.

    1. in the first step the owners send their shards x exactly, and h is these
    2. from then on, once per optimizer step: ``c = C(x - h)`` for the own shard, where C is the blockwise code of
       `WeightCode`
    3. one all-gather of the codes c of all owners per sharded module
    4. every rank, the owner too: ``h += c``; the module computes with h

    Where a weight is NaN its block is NaN on all ranks in that step, and differences begin from 0 in the next.

    So errors do not add up: ``|x - h|`` is what C leaves of one difference, and differences are as small as the
    optimizer's steps. A checkpoint has each owner's part of h; when it is resumed these are sent exactly once.

    Args:
        bits: A code has so many: 8, 4 or 2.
        keep: Differences need the replica: 4 bytes per parameter on every rank, 2 where the forward's weights are in
            16 bits. No other value is allowed.
        exempt: Parameters that travel exactly, in the same message: as for a compressor's `exempt`.
        high_precision: Parameters that have at least `high_precision_bits`. None by default: the replica
            makes up for their errors too.
        high_precision_bits: 8, 6, 5 or 4.
        block_size: Elements that share a scale: a power of two from 32 to 4,096.

    Raises:
        ValueError: A field is out of range.

    References:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
        Feedback", 2021, arXiv 2106.05203, equation 11, here of weights; Jia et al., "SDP4Bit: Toward 4-bit
        Communication Quantization in Sharded Data Parallelism for LLM Training", 2024, arXiv 2410.15526, section 3.1
        (whose differences are of successive weights, without the part that was left out).
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
