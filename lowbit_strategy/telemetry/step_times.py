"""How long steps take, and how long training waits in them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from lowbit_strategy.engine.engine import GradientSync

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """This thread's time on CPU; on CUDA the current stream's, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Moment, ended: Moment) -> float:
    """Seconds between two moments. On CUDA it waits until the device has reached `ended`."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3


class StepTime(NamedTuple):
    """The times of one step. `waited_s`: the part of `seconds` spent waiting; None: not measured."""

    seconds: float
    waited_s: float | None


class StepClock:
    """Times the steps between `start` and `take`; on CUDA by the device's clock, which is read in `take`.

    Args:
        device: Device of the gradients.

    Attributes:
        is_timing: Whether `start` has been called, and `take` not yet.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_timing = False
        self._device = device
        self._ends: list[Moment] = []  # of steps; empty: nothing is timed
        self._waits: list[tuple[int, Moment, Moment]] = []  # in which step, from when, until when

    def start(self) -> None:
        """A step begins now."""
        self._ends, self._waits, self.is_timing = [now(self._device)], [], True

    def end_step(self) -> None:
        """A step ends, and the next begins."""
        if self._ends:
            self._ends.append(now(self._device))

    def wait(self) -> Callable[[], None] | None:
        """Training waits from now until the returned function is called, from any thread. None: no step is timed."""
        if not self._ends:
            return None
        waits, step, began = self._waits, len(self._ends), now(self._device)
        return lambda: waits.append((step, began, now(self._device)))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which training waits. On CUDA that is not known, since work runs during computation."""
        done = self.wait() if self._device.type == "cpu" else None
        yield
        if done is not None:
            done()

    def take(self) -> list[StepTime]:
        """Return the steps since `start`. Nothing more is timed until the next `start`."""
        ends, waits, self._ends, self._waits = self._ends, self._waits, [], []
        self.is_timing = False
        waited = [0.0] * (len(ends) + 1)
        for step, began, ended in waits:
            waited[step] += seconds_between(began, ended)
        return [
            StepTime(seconds_between(before, end), waited[at] if waits else None)
            for at, (before, end) in enumerate(itertools.pairwise(ends), start=1)
        ]


_clocks: WeakKeyDictionary[GradientSync, StepClock] = WeakKeyDictionary()


def clock_of(sync: GradientSync) -> StepClock:
    """The clock of an engine's steps, which hooks tell when training waits."""
    if sync not in _clocks:
        _clocks[sync] = StepClock(sync.device)
    return _clocks[sync]
