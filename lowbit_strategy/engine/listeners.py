"""Objects that are called when a step begins, when it ends, and at a few moments in between.

| phase | who | may |
|---|---|---|
| `DECIDE` | controllers | give parameters other methods |
| `OBSERVE` | monitors | see how the methods change the gradients |
| `RECORD` | everyone else | prepare state for the step, and read |

A step begins in this order. It ends with observations, then decisions, then records. Within a phase, listeners are
called in the order in which they subscribed. A rank may end its step alone; exchanges between ranks happen in
`when_all_have_ended`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import IntEnum

import torch

from lowbit_strategy.engine.bucket import BucketObserver


class StepPhase(IntEnum):
    DECIDE = 0
    OBSERVE = 1
    RECORD = 2


class StepListener:
    """Measures, decides or records. These methods do nothing; subclasses override those that they need."""

    def begin_pass(self, loss: torch.Tensor | None) -> None:
        """A backward pass begins, perhaps on this rank alone. `loss`: the batch's, if it is known."""

    def begin_step(self) -> BucketObserver | None:
        """Begin a step, before anything is reduced. Return the observers of the step's buckets."""
        return None

    def end_step(self, *, counted: bool) -> None:
        """Called when the step has ended on this rank. `counted`: whether it counts, that is, did not overflow."""

    def wait(self) -> Callable[[], None] | None:
        """Training begins to wait for messages. Return what to call, from any thread, when the wait ends."""
        return None

    def checkpoint_loaded(self) -> None:
        """A checkpoint has been read, and the state is about to be restored."""


_END_ORDER = (StepPhase.OBSERVE, StepPhase.DECIDE, StepPhase.RECORD)


class Listeners:
    """The listeners of one engine, by phase."""

    def __init__(self) -> None:
        self._by_phase: defaultdict[StepPhase, list[StepListener]] = defaultdict(list)
        self._when_all_have_ended: list[Callable[[], None]] = []

    def __getitem__(self, phase: StepPhase) -> list[StepListener]:
        return self._by_phase[phase]

    def add(self, listener: StepListener, phase: StepPhase) -> None:
        self[phase].append(listener)

    def remove(self, listener: StepListener) -> None:
        for listeners in self._by_phase.values():
            if listener in listeners:
                listeners.remove(listener)

    @property
    def _all(self) -> list[StepListener]:
        return [listener for phase in StepPhase for listener in self[phase]]

    def begin_pass(self, loss: torch.Tensor | None) -> None:
        for listener in self._all:
            listener.begin_pass(loss)

    def begin_step(self, phase: StepPhase) -> list[BucketObserver]:
        """Returns the observers of the step's buckets."""
        observers = [listener.begin_step() for listener in self[phase]]
        return [observer for observer in observers if observer is not None]

    def end_step(self, *, counted: bool) -> None:
        for phase in _END_ORDER:
            for listener in list(self[phase]):
                listener.end_step(counted=counted)

    def wait(self) -> Callable[[], None] | None:
        """Returns what to call, from any thread, when the wait ends; None: no listener measures it."""
        ends = [end for listener in self._all if (end := listener.wait()) is not None]

        def end_all() -> None:
            for end in ends:
                end()

        return end_all if ends else None

    def checkpoint_loaded(self) -> None:
        for listener in self._all:
            listener.checkpoint_loaded()

    def when_all_have_ended(self, call: Callable[[], None]) -> None:
        """Run `call`, which may communicate, when all ranks have ended the step. Used in `end_step`."""
        self._when_all_have_ended.append(call)

    def all_have_ended(self) -> None:
        """Run the calls given to `when_all_have_ended`, because all ranks have ended the step."""
        calls, self._when_all_have_ended = self._when_all_have_ended, []
        for call in calls:
            call()
