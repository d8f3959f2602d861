"""SparseLoCo: sparse pseudo-gradients whose decaying residual does what the outer momentum does elsewhere."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.outer.localsgd import LocalSGD
from lowbit_strategy.methods.sparsification.topk import TopK
from lowbit_strategy.options.configuration import configuration

# The largest of Gaussian elements lie close together: two magnitudes, in units of their mean, are within 6 % of them.
_VALUES = BlockFormat(bits=2, block_size=64, scale_rule="mean_abs", codebook=(-1.21875, -0.9453125, 0.9453125, 1.21875))


@configuration
class SparseLoCo(LocalSGD):
    """The largest 64th of every 4,096 elements, 2 bits each; what is not sent stays, times 0.95 per round, for later.

    Every rank's message goes to all ranks, as published: their mean is exact.

    There is no outer momentum: it would be spent on the few elements that have come. The residual takes its place.

    Args:
        every: Optimizer steps of a round; see `OuterRule`.
        lr: The outer SGD steps with it.
        fragments, delay, mix, average_state: See `OuterRule`.
        synchronous, synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.

    Raises:
        ValueError: A field is out of range.

    References:
        Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv 2508.15706.
    """

    name: ClassVar[str] = "sparseloco"

    lr: float = 1.0

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not self.lr > 0.0:
            raise ValueError(f"lr must be above 0, got {self.lr!r}")

    def compressor(self) -> Compressor:
        return TopK(density=1 / 64, values=BlockCodec(_VALUES), selection="chunk", gather=True, decay=0.95)
