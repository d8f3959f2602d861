"""Local SGD and its relatives: ranks train separately, then average their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from torch.optim import SGD, Optimizer

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.options.configuration import configuration


@configuration
class LocalSGD(OuterRule):
    """The mean of all ranks' weights after every round: ``anchor = anchor - mean(anchor - weights)``.

    With ``every=1``, an exact codec and plain SGD inside, this is synchronous training.

    References:
        Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv 1805.09767.
    """

    name: ClassVar[str] = "localsgd"
    lr = 1.0  # of the outer SGD; both become options in subclasses
    momentum = 0.0

    @property
    def moment_nbytes(self) -> float:
        return 4.0 if self.momentum else 0.0

    def optimizer(self, anchors: Sequence[Tensor]) -> Optimizer:
        return SGD(anchors, lr=self.lr, momentum=self.momentum)


@configuration
class OverlapLocalSGD(LocalSGD):
    """At the end of a round each rank is pulled towards the previous anchor, then sends its weights.

    1. ``weights = mix * weights + (1 - mix) * anchor``
    2. while the next round is trained, the ranks' weights travel
    3. ``v = momentum * v + mean(weights) - anchor``, ``anchor = anchor + v``

    Args:
        momentum: Of the anchor, in [0, 1).
        delay: Left at 0: bytes travel until the next fragment is sent.
        mix: Share of a rank's own weights in step 1.

    References:
        Wang et al., "Overlap Local-SGD: An Algorithmic Approach to Hide Communication Delays in Distributed SGD",
        2020, arXiv 2002.09539.
    """

    name: ClassVar[str] = "overlaplocalsgd"
    travels_a_turn: ClassVar[bool] = True

    momentum: float = 0.7
    mix: float = 0.4

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.delay:
            raise ValueError(f"delay must be left at 0, bytes travel for a whole round anyway, got {self.delay}")


@configuration
class PostLocalSGD(LocalSGD):
    """Synchronous training for the first steps, through the same compressor; then local SGD.

    All rules have this option; here it is the default.

    Args:
        synchronous: Optimizer steps of the synchronous part, at least 1, or a share of `num_steps`. More: closer to
            synchronous training, more bytes.

    References:
        Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", 2018, arXiv 1808.07217.
    """

    name: ClassVar[str] = "postlocalsgd"

    synchronous: int | float = 1000

    def __post_init__(self) -> None:
        LocalSGD.__post_init__(self)
        if not self.synchronous:
            raise ValueError("synchronous must be a positive integer, or a share of the run: without it use LocalSGD")


# The largest elements of a Gaussian are close together: two magnitudes, in units of their mean, fit them within 6 %.
_VALUES = BlockFormat(bits=2, block_size=64, scale_rule="mean_abs", codebook=(-1.21875, -0.9453125, 0.9453125, 1.21875))


@configuration
class SparseLoCo(LocalSGD):
    """The largest 64th of every 4,096 elements, 2 bits each; the residual decays by 0.95 per round.

    Every rank's message goes to all ranks, as published: their mean is exact. The residual replaces outer momentum,
    which would only move the few elements that were sent.

    Args:
        lr: Of the outer SGD.

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
