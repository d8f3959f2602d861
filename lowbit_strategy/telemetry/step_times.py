"""Measures how long steps take and how long training waits in them, and reports it after 50 steps."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.inform import inform
from lowbit_strategy.methods.weight_codings import Exact
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.messages import step_nbytes
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.weight_bytes import weight_transfers

WARM_STEPS, TIMED_STEPS = 40, 10

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


def median_step(times: list[StepTime]) -> StepTime:
    """The median of each time."""
    waited = [each.waited_s for each in times if each.waited_s is not None]
    return StepTime(statistics.median(each.seconds for each in times), statistics.median(waited) if waited else None)


_clocks: WeakKeyDictionary[GradientSync, StepClock] = WeakKeyDictionary()


def clock_of(sync: GradientSync) -> StepClock:
    """The clock of an engine's steps, which hooks tell when training waits."""
    if sync not in _clocks:
        _clocks[sync] = StepClock(sync.device)
    return _clocks[sync]


class StepTimes(StepListener):
    """Times some steps on this rank and reports them once, without sending or allocating anything.

    1. `WARM_STEPS` steps pass
    2. the next `TIMED_STEPS` are timed, and their bytes are counted

    Args:
        sync: The engine, which reduces gradients in every step.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync, self._clock = sync, clock_of(sync)
        self._num_steps = self._sent_before = 0
        sync.listeners.add(self, StepPhase.RECORD)

    def end_step(self, *, counted: bool) -> None:
        """Called by the engine."""
        self._num_steps += 1
        if self._num_steps == WARM_STEPS:
            self._clock.start()
            self._sent_before = self._sync.sent_nbytes
            return
        self._clock.end_step()
        if self._num_steps == WARM_STEPS + TIMED_STEPS:
            sent = (self._sync.sent_nbytes - self._sent_before) // TIMED_STEPS
            weights = self._sync.weights
            sent += 0 if weights is None else weights.step_nbytes
            inform("lowbit_strategy: %s", step_line(median_step(self._clock.take()), sent, self._sync.plans()))
            self._sync.listeners.remove(self)


def step_line(step: StepTime, sent_nbytes: int, plans: Sequence[StepPlan]) -> str:
    """The line to report.

    Args:
        step: The median of the timed steps.
        sent_nbytes: Bytes that this rank sent in one of them for gradients and weights.
        plans: The plans of the run, by reducing ranks.
    """
    fp32, bf16 = (sum(uncompressed_nbytes(plan, dtype) for plan in plans) for dtype in (torch.float32, torch.bfloat16))
    what = "gradients" if plans[0].coding in (None, Exact()) else "gradients and weights"
    waited = "" if step.waited_s is None else f", {step.waited_s:.2g} s of it waiting for {what}"
    return (
        f"a step takes {step.seconds:.3g} s{waited} (median of steps {WARM_STEPS + 1} to {WARM_STEPS + TIMED_STEPS} on"
        f" rank 0), and a rank sends {size(sent_nbytes)}; float32 would send {size(fp32)},"
        f" bfloat16 {size(bf16)}"
    )


def uncompressed_nbytes(plan: StepPlan, dtype: torch.dtype) -> int:
    """Bytes that a rank would send to the same peers in a step for gradients and FSDP2's weights, all of `dtype`."""
    modules = {name: replace(module, dtype=dtype) for name, module in plan.modules.items()}
    weights = weight_transfers(Exact(), modules, plan.topology, plan.layout)
    return plan.uncompressed_nbytes(dtype.itemsize) + step_nbytes(weights)
