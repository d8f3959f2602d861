"""Rounds whose length changes during training."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import call, named, register_conversion


@configuration
class Interval(ABC):
    """Decides the length of each round when it begins.

    Attributes:
        needs_loss: Whether it decides by the loss.
    """

    needs_loss: ClassVar[bool] = False

    @property
    @abstractmethod
    def shortest(self) -> int:
        """Optimizer steps of the shortest possible round."""

    @abstractmethod
    def at(self, step: int, learning_rate: float | None, *, rising: bool = False, progress: float | None = None) -> int:
        """Optimizer steps of the round that begins.

        Args:
            step: Optimizer steps completed.
            learning_rate: Learning rate of the inner optimizer; None: unknown.
            rising: Whether it rose in the last step, as in a warm-up.
            progress: The mean loss of the last known round divided by that of the first one; None: unknown.
        """

    def check_options(self, options: Any) -> None:  # noqa: B027 (most go with all)
        """See `Part.check_options`."""


@configuration
class Quadratic(Interval):
    """The quadratic rule: ``every = max(minimum, floor((alpha / learning rate)^2))``, at most `maximum`.

    Rounds grow as the learning rate falls. During a warm-up they are as long as right after it.

    Args:
        alpha: The learning rate at which rounds would have one step. Larger: longer rounds.
        peak: The learning rate at the end of the warm-up. None: unknown, rounds have `minimum` steps until then.
        minimum: Optimizer steps of the shortest round.
        maximum: Optimizer steps of the longest round.

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

    def at(self, step: int, learning_rate: float | None, *, rising: bool = False, progress: float | None = None) -> int:
        if rising or not learning_rate:  # or unknown, or 0 at the start of a warm-up
            learning_rate = self.peak
        if learning_rate is None:
            return self.minimum
        return min(self.maximum, max(self.minimum, math.floor((self.alpha / learning_rate) ** 2)))


@configuration
class AdaComm(Interval):
    """AdaComm: ``every = ceil(start * sqrt(loss / first loss))``: rounds become shorter as the loss falls.

    Early in training long rounds cost little; near the end ranks must agree. The loss is the mean over all ranks'
    batches in the second-to-last round. If it is not positive, rounds keep their first length. In plain PyTorch, call
    ``session.begin_step(loss=loss)`` before every backward pass.

    Args:
        start: Optimizer steps of the first rounds.
        minimum: Optimizer steps of the shortest round.

    References:
        Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update
        SGD", 2018, arXiv 1810.08313, equation 17, per round instead of per minute.
    """

    needs_loss: ClassVar[bool] = True

    start: int = 60
    minimum: int = 4

    def __post_init__(self) -> None:
        check_positive("minimum", self.minimum)
        if self.start < self.minimum:
            raise ValueError(f"start must be at least minimum, {self.minimum}, got {self.start}")

    @property
    def shortest(self) -> int:
        return self.minimum

    def at(self, step: int, learning_rate: float | None, *, rising: bool = False, progress: float | None = None) -> int:
        if progress is None or not progress > 0.0:
            return self.start
        return max(self.minimum, math.ceil(self.start * min(1.0, progress) ** 0.5))


@configuration
class Seconds(Interval):
    """Rounds by time, in which machines of different speeds take as many steps as they can. Needs ``elastic``.

    Args:
        seconds: Length of a round, on each replica's clock.
        expected: Optimizer steps of a round, for plans and reports before the first round.

    Raises:
        ValueError: A field is not positive.
    """

    seconds: float
    expected: int = 50

    def __post_init__(self) -> None:
        if not self.seconds > 0.0:
            raise ValueError(f"seconds must be a positive number, got {self.seconds!r}")
        check_positive("expected", self.expected)

    def __str__(self) -> str:
        return f"{self.seconds:g} s"

    @property
    def shortest(self) -> int:
        return self.expected

    def at(self, step: int, learning_rate: float | None, *, rising: bool = False, progress: float | None = None) -> int:
        return self.expected

    def check_options(self, options: Any) -> None:
        if options.elastic is None:
            raise ValueError(f'every="{self.seconds:g}s" needs elastic: ranks that stay together take as many steps')


@configuration
class Stepwise(Interval):
    """Round lengths by the number of optimizer steps completed.

    Args:
        lengths: Pairs of a first step and a length, in order, starting from step 0: ``((0, 5), (1000, 30))``.

    Raises:
        ValueError: They are out of order, do not begin at 0, or a length is not positive.
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

    def at(self, step: int, learning_rate: float | None, *, rising: bool = False, progress: float | None = None) -> int:
        return next(length for start, length in reversed(self.lengths) if start <= step)


_INTERVALS: dict[str, type[Interval]] = {
    interval.__name__.lower(): interval for interval in (AdaComm, Quadratic, Seconds, Stepwise)
}


def _interval(value: Any) -> Interval:
    if isinstance(value, str) and (seconds := re.fullmatch(r"(\d+(?:\.\d+)?) ?s", value)):
        return Seconds(seconds=float(seconds[1]))
    cls, options = named(value, _INTERVALS, "interval")
    return call(cls, options)


register_conversion(
    Interval, _interval, "an interval such as Quadratic(alpha=0.02), '30s' or {name: quadratic, alpha: 0.02}"
)
