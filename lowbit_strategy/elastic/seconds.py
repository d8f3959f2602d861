"""Rounds by time."""

from __future__ import annotations

from typing import Any

from lowbit_strategy.local_steps.interval import Interval
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration


@configuration
class Seconds(Interval):
    """Rounds by time: machines of different speeds take as many steps as they can. Needs ``elastic``.

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
