"""Rounds whose length changes while training goes on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.options.configuration import configuration


@configuration
class Interval(ABC):
    """Gives the length of each round when it begins."""

    @property
    @abstractmethod
    def shortest(self) -> int:
        """Optimizer steps of the shortest round that may come."""

    @abstractmethod
    def at(self, step: int, learning_rate: float | None, *, rising: bool = False) -> int:
        """Optimizer steps of the round that begins.

        Args:
            step: Optimizer steps completed.
            learning_rate: Of the inner optimizer; None if it is not known.
            rising: Whether the last step's was higher than that of the step before: a warm-up.
        """


@configuration
class Quadratic(Interval):
    """The quadratic rule: ``every = max(minimum, floor((alpha / learning rate)^2))``, at most `maximum`.

    While the learning rate is high ranks synchronise often; as it falls rounds grow. While it rises, in a warm-up,
    rounds are as long as they will be right after it.

    Args:
        alpha: The learning rate at which rounds would have one step. Larger: longer rounds.
        peak: The learning rate that the warm-up leads to. None: not known, and rounds have `minimum` until it is over.
        minimum: Optimizer steps of the shortest round.
        maximum: No interval is longer.

    Raises:
        ValueError: A field is out of range.

    References:
        Gu et al., "A Quadratic Synchronization Rule for Distributed Deep Learning", 2023, arXiv 2310.14423.
    """

    alpha: float
    peak: float | None = None
    minimum: int = 4
    maximum: int = 500

    def __post_init__(self) -> None:
        if self.peak is not None and not self.peak > 0.0:
            raise ValueError(f"peak must be above 0, the highest learning rate, or None, got {self.peak!r}")
        if not self.alpha > 0.0:
            raise ValueError(f"alpha must be above 0, in units of the learning rate, got {self.alpha!r}")
        check_positive("minimum", self.minimum)
        if self.maximum < self.minimum:
            raise ValueError(f"maximum must be at least minimum, {self.minimum}, got {self.maximum}")

    @property
    def shortest(self) -> int:
        return self.minimum

    def at(self, step: int, learning_rate: float | None, *, rising: bool = False) -> int:
        if rising or not learning_rate:  # or not known, or 0 at the start of a warm-up
            learning_rate = self.peak
        if learning_rate is None:
            return self.minimum
        return min(self.maximum, max(self.minimum, math.floor((self.alpha / learning_rate) ** 2)))


@configuration
class Stepwise(Interval):
    """Round lengths by the number of optimizer steps completed.

    Args:
        lengths: Pairs of a first step and a length, in order, the first one from step 0: ``((0, 5), (1000, 30))``.

    Raises:
        ValueError: They are not in order, do not begin at 0, or a length is not positive.
    """

    lengths: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts = [start for start, _ in self.lengths]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"lengths must begin at step 0 and go upwards, as in ((0, 5), (1000, 30)), got {starts!r}")
        for _, length in self.lengths:
            check_positive("lengths", length)

    @property
    def shortest(self) -> int:
        return min(length for _, length in self.lengths)

    def at(self, step: int, learning_rate: float | None, *, rising: bool = False) -> int:
        return next(length for start, length in reversed(self.lengths) if start <= step)
