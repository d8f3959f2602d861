"""Turns at time intervals, regardless of the number of steps in that time."""

from __future__ import annotations

import time
from typing import Any

from lowbit_strategy.local_steps.interval import Seconds
from lowbit_strategy.local_steps.turns import Turns


class TimedTurns(Turns):
    """Turns for rules that may give rounds in seconds; with rounds in steps it behaves like `Turns`.

    Attributes:
        has_time: Whether all ranks of the replica take another step before the next turn.
    """

    def __init__(self, *values: Any) -> None:
        super().__init__(*values)
        self._seconds = self._rule.every.seconds if isinstance(self._rule.every, Seconds) else None
        self.has_time = True
        self.restart_clock()

    @property
    def interval(self) -> int:
        """Steps of a round. In timed rounds, the steps taken so far if time is up, otherwise one more."""
        return super().interval if self._seconds is None else max(1, self.since + self.has_time)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the next turn; None: rounds are in steps."""
        return None if self._seconds is None else self._seconds / self._num - (time.monotonic() - self._last)

    def restart_clock(self, num_steps: int | None = None) -> None:
        """Restart the clock: a turn has ended now, after `num_steps`."""
        self._last = time.monotonic()
        if self._seconds is not None and num_steps is not None:
            self.round_length = num_steps * self._num
