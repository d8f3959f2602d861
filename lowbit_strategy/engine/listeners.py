"""Objects that are called when a step begins and when it ends.

| phase | who | may |
|---|---|---|
| `DECIDE` | controllers | give parameters other methods |
| `OBSERVE` | monitors | see how the methods change the gradients |
| `RECORD` | everyone else | prepare state for the step, and read |

A step begins in this order. It ends with observations, then decisions, then records. Within a phase, listeners are
called in the order in which they subscribed. A rank may end its step alone; exchanges between ranks happen in
`together`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from lowbit_strategy.engine.bucket import BucketObserver


class StepPhase(IntEnum):
    DECIDE = 0
    OBSERVE = 1
    RECORD = 2


class StepListener:
    """Measures, decides or records. These methods do nothing; subclasses override those that they need."""

    def begin_step(self) -> BucketObserver | None:
        """Begin a step, before anything is reduced. Return the observers of the step's buckets."""
        return None

    def end_step(self, *, counted: bool) -> None:
        """Called when the step has ended on this rank. `counted`: whether it counts, that is, did not overflow."""


_END_ORDER = (StepPhase.OBSERVE, StepPhase.DECIDE, StepPhase.RECORD)


class Listeners:
    """The listeners of one engine, by phase.

    Attributes:
        control: The listener that monitors and adapts the model; None: there is none.
        rates: Returns the learning rate of each parameter that an optimizer steps.
        learning_rate: Returns the rate of the optimizer that steps the model; None: that optimizer is unknown.
        wait: Called when training begins to wait for messages. Returns a function to call, from any thread, when the
            wait ends; None: nothing measures it.
    """

    def __init__(self) -> None:
        self.control: Any = None
        self.rates: Callable[[], Mapping[str, float]] = dict
        self.learning_rate: Callable[[], float | None] = lambda: None
        self.wait: Callable[[], Callable[[], None] | None] = lambda: None
        self._by_phase: defaultdict[StepPhase, list[StepListener]] = defaultdict(list)
        self._together: list[Callable[[], None]] = []

    def __getitem__(self, phase: StepPhase) -> list[StepListener]:
        return self._by_phase[phase]

    def add(self, listener: StepListener, phase: StepPhase) -> None:
        self[phase].append(listener)

    def remove(self, listener: StepListener) -> None:
        for listeners in self._by_phase.values():
            if listener in listeners:
                listeners.remove(listener)

    def begin_step(self, phase: StepPhase) -> list[BucketObserver]:
        """Returns the observers of the step's buckets."""
        observers = [listener.begin_step() for listener in self[phase]]
        return [observer for observer in observers if observer is not None]

    def end_step(self, *, counted: bool) -> None:
        for phase in _END_ORDER:
            for listener in list(self[phase]):
                listener.end_step(counted=counted)

    def together(self, call: Callable[[], None]) -> None:
        """Run `call`, which may communicate, when all ranks have ended the step. Used in `end_step`."""
        self._together.append(call)

    def meet(self) -> None:
        """Run the calls given to `together`, because all ranks have ended the step."""
        calls, self._together = self._together, []
        for call in calls:
            call()
