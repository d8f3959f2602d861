"""How long steps take, and how long of each training waits for communication, without making the device wait."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from lowbit_strategy.engine.engine import GradientSync

_Moment = float | torch.cuda.Event


class StepTime(NamedTuple):
    """One step. `waited_s`: of `seconds`, what was spent waiting; None: nothing has timed it."""

    seconds: float
    waited_s: float | None


class StepClock:
    """Between `start` and `take`, times steps. On CUDA by the device's own clock, which is read in `take`.

    Args:
        device: Of the gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ends: list[_Moment] = []  # of steps; empty: nothing is timed
        self._waits: list[tuple[int, _Moment, _Moment]] = []  # in which step, from when, until when

    def start(self) -> None:
        """A step begins now."""
        self._ends, self._waits = [self._now()], []

    def end_step(self) -> None:
        """A step ends, and the next begins."""
        if self._ends:
            self._ends.append(self._now())

    def wait(self) -> Callable[[], None]:
        """Training has nothing to do from now on, until what this returns is called, from whichever thread."""
        if not self._ends:
            return lambda: None
        step, began = len(self._ends), self._now()
        return lambda: self._waits.append((step, began, self._now()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Training waits inside. On CUDA that is not known: what the host asks for runs beside computation."""
        done = self.wait() if self._device.type == "cpu" else None
        yield
        if done is not None:
            done()

    def take(self) -> list[StepTime]:
        """The steps since `start`. Nothing is timed after that until the next one."""
        ends, waits, self._ends, self._waits = self._ends, self._waits, [], []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        waited = [0.0] * (len(ends) + 1)
        for step, began, ended in waits:
            waited[step] += _seconds(began, ended)
        return [StepTime(_seconds(ends[at - 1], ends[at]), waited[at] if waits else None) for at in range(1, len(ends))]

    def _now(self) -> _Moment:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(began: _Moment, ended: _Moment) -> float:
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert isinstance(ended, torch.cuda.Event)
    return float(began.elapsed_time(ended)) / 1e3


def median_step(times: list[StepTime]) -> StepTime:
    """The median of each figure."""
    waited = [each.waited_s for each in times if each.waited_s is not None]
    return StepTime(statistics.median(each.seconds for each in times), statistics.median(waited) if waited else None)


_clocks: WeakKeyDictionary[GradientSync, StepClock] = WeakKeyDictionary()


def clock_of(sync: GradientSync) -> StepClock:
    """The clock of an engine's steps: hooks tell it when training waits."""
    return _clocks.setdefault(sync, StepClock(sync.device))
