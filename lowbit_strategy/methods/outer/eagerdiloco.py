"""Eager DiLoCo: a round's mean travels through the next round, and each rank goes ahead with its own share."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.methods.outer.diloco import DiLoCo
from lowbit_strategy.options.configuration import configuration


@configuration
class EagerDiLoCo(DiLoCo):
    """`DiLoCo` whose bytes have a whole turn to travel, W ranks, ``d(t)`` the own pseudo-gradient of round t.

    1. after round t the mean of round t - 1 has arrived: ``D = d(t) / W + mean(t - 1) - d(t - 1) / W``
    2. each rank's outer optimizer steps with D from where its round has begun; ``d(t)`` is sent
    3. the next round is trained while it travels

    Only the others' share is a round old, so that less is lost than with everything a round late. The anchor that all
    ranks share, to validate and to save, is moved by the means that have arrived.

    Args:
        fragments, average_state, synchronous, synchronous_end, synchronous_compressor, num_steps: See `OuterRule`.
        every, lr, momentum, nesterov, decay: See `DiLoCo`.
        delay, mix: Left at 0.
        optimizer_class: Left at SGD: the anchor and a rank's own share add up because it is linear.

    Raises:
        ValueError: A field is out of range.

    References:
        Kale et al., "Eager Updates For Overlapped Communication and Computation in DiLoCo", 2025, arXiv 2502.12996.
    """

    name: ClassVar[str] = "eagerdiloco"
    eager: ClassVar[bool] = True
    travels_a_turn: ClassVar[bool] = True

    def __post_init__(self) -> None:
        DiLoCo.__post_init__(self)
        if self.delay or self.mix:
            raise ValueError(
                f"delay and mix must be left at 0, got {self.delay} and {self.mix}: bytes travel for a whole turn"
                " anyway"
            )
        if self.optimizer_class != "SGD":
            raise ValueError(
                f"optimizer_class must be left at 'SGD', got {self.optimizer_class!r}: a rank's own share and the"
                " others' are stepped apart and added up, which holds for a linear optimizer only"
            )

    @property
    def moment_nbytes(self) -> float:
        return 2 * super().moment_nbytes + 4.0  # the own share's, and how far it is ahead
