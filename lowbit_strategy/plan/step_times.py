"""Measures how long steps take, and how long training waits in them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch

from lowbit_strategy.telemetry.instants import Instant, now, seconds_between


class StepTime(NamedTuple):
    """The times of one step. `waited_s`: the part of `seconds` spent waiting; None: not measured."""

    seconds: float
    waited_s: float | None


class StepClock:
    """Times the steps between `start` and `take`; on CUDA by the device's clock, which is read in `take`.

    Args:
        device: Device of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[Instant] = []  # ends of steps; empty: nothing is timed
        self._waits: list[tuple[int, Instant, Instant]] = []  # step, begin and end of each wait

    def start(self) -> None:
        """Start timing: a step begins now."""
        self._ends, self._waits = [now(self._device)], []

    def end_step(self) -> None:
        """A step ends, and the next begins."""
        if self._ends:
            self._ends.append(now(self._device))

    def wait(self) -> Callable[[], None] | None:
        """Time a wait from now until the returned function is called, from any thread. None: no step is timed."""
        if not self._ends:
            return None
        waits, step, began = self._waits, len(self._ends), now(self._device)
        return lambda: waits.append((step, began, now(self._device)))

    def take(self) -> list[StepTime]:
        """Return the steps since `start`. Nothing more is timed until the next `start`."""
        ends, waits, self._ends, self._waits = self._ends, self._waits, [], []
        waited = [0.0] * (len(ends) + 1)
        for step, began, ended in waits:
            waited[step] += seconds_between(began, ended)
        return [
            StepTime(seconds_between(before, end), waited[at] if waits else None)
            for at, (before, end) in enumerate(itertools.pairwise(ends), start=1)
        ]
