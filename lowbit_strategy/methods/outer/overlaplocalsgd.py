"""Overlap local SGD: the mean of one round's weights travels through the whole next round."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods.outer.localsgd import LocalSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class OverlapLocalSGD(LocalSGD):
    """At the end of a round each rank is pulled towards the anchor of the round before, then sends its weights.

    1. ``weights = mix * weights + (1 - mix) * anchor``
    2. while the next round is trained, the ranks' weights travel
    3. ``v = momentum * v + mean(weights) - anchor``, ``anchor = anchor + v``

    Args:
        every: Optimizer steps of a round; see `OuterRule`.
        momentum: The anchor moves on with it, in [0, 1).
        fragments, average_state, synchronous, synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.
        delay: Left at 0: it is the whole time until the next fragment is sent.
        mix: Share of a rank's own weights that is kept in step 1.

    Raises:
        ValueError: A field is out of range.

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
