"""Decides by step times whether one set-up is certainly faster than another.

References:
    Mann & Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other", 1947.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

AUTO_MAX_STEP_RATIO = 0.97  # relative to the framework's own step; anything slower is not worth using
MIN_WIN_RATE = 0.8  # fraction of all pairs of steps in which one is faster; chance gives this once in thirty times


@dataclass(frozen=True, slots=True)
class Timed:
    """The timed steps of one set-up.

    Args:
        name: Its name in reports.
        seconds: Duration of each step.
    """

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median; for an even number of steps the lower middle one, since disturbances make steps longer."""
        return statistics.median_low(self.seconds)

    def is_certainly_faster(self, other: Timed) -> bool:
        """Whether this is faster in most pairs of steps, one from each, counted as by Mann and Whitney."""
        pairs = [own < seconds for own in self.seconds for seconds in other.seconds]
        return sum(pairs) >= MIN_WIN_RATE * len(pairs)

    def __str__(self) -> str:
        ordered, out = sorted(self.seconds), len(self.seconds) // 4
        return f"{self.name} {self.median:.3g} s ({ordered[out]:.3g} to {ordered[-1 - out]:.3g})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision: candidate number `chosen` (None: the framework's own steps), and the reason."""

    chosen: int | None
    reason: str


def decide(own: Timed, tried: Sequence[Timed]) -> Verdict:
    """The fastest of the candidates that are certainly faster than the framework's own steps."""
    if not tried:
        return Verdict(None, "no candidate fits into memory")
    measured = ", ".join(str(each) for each in (own, *tried))
    faster = [at for at, each in enumerate(tried) if each.median <= AUTO_MAX_STEP_RATIO * own.median]
    if not faster:
        return Verdict(None, f"no candidate is faster than the framework's own step: {measured}")
    certain = [at for at in faster if tried[at].is_certainly_faster(own)]
    if not certain:
        return Verdict(None, f"step times vary too much to tell which is faster, so nothing is changed: {measured}")
    best = min(certain, key=lambda at: tried[at].median)
    return Verdict(best, f"{own.median / tried[best].median:.2f} times as fast as the framework's own step: {measured}")
