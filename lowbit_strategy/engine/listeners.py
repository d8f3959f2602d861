"""Who is called when a step begins and ends, and in which order.

| phase | who | may |
|---|---|---|
| `DECIDE` | controllers | give parameters other methods |
| `OBSERVE` | monitors | look at what the methods make of the gradients |
| `RECORD` | everyone else | read |

A step begins in this order. It ends with what observers have measured, then decisions, then records. Within a phase the
order is that of subscription. All ranks call at the same point, when no collective is in flight.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from lowbit_strategy.engine.bucket import BucketObserver


class StepPhase(IntEnum):
    """When a listener is called."""

    DECIDE = 0
    OBSERVE = 1
    RECORD = 2


class StepListener(Protocol):
    """Someone who measures, decides or records."""

    def begin_step(self) -> BucketObserver | None:
        """Before anything of a step is reduced. Returns who looks at the step's buckets."""

    def end_step(self, *, counted: bool) -> None:
        """The step is over. `counted`: it did not overflow."""


_END_ORDER = (StepPhase.OBSERVE, StepPhase.DECIDE, StepPhase.RECORD)


class Listeners:
    """The listeners of one engine, by phase."""

    def __init__(self) -> None:
        self._by_phase: dict[StepPhase, list[StepListener]] = {phase: [] for phase in StepPhase}

    def add(self, listener: StepListener, phase: StepPhase) -> None:
        self._by_phase[phase].append(listener)

    def remove(self, listener: StepListener) -> None:
        for listeners in self._by_phase.values():
            if listener in listeners:
                listeners.remove(listener)

    def begin_step(self, phase: StepPhase) -> list[BucketObserver]:
        """Returns the observers of the step's buckets."""
        observers = [listener.begin_step() for listener in self._by_phase[phase]]
        return [observer for observer in observers if observer is not None]

    def end_step(self, *, counted: bool) -> None:
        for phase in _END_ORDER:
            for listener in list(self._by_phase[phase]):
                listener.end_step(counted=counted)
