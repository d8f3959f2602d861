"""Schedule: a compressor for each phase of training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from typing import Literal

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import Controller, Decision, Progress, State, Telemetry
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.configuration import configuration

PhaseUnit = Literal["step", "epoch", "fraction"]


@configuration
class Phase:
    """One phase of training with its compressor.

    Args:
        compressor: The compressor of this phase.
        start: First optimizer step or epoch of the phase, or the fraction of the run at which it starts.
        unit: What `start` counts.

    Raises:
        ValueError: `start` is out of range.
    """

    compressor: Compressor
    start: float = 0
    unit: PhaseUnit = "step"

    def __post_init__(self) -> None:
        limit = 1.0 if self.unit == "fraction" else math.inf
        if not 0 <= self.start <= limit:
            raise ValueError(f"a phase needs 0 <= start{' <= 1' if limit == 1 else ''}, got {self.start!r}")
        if self.unit != "fraction" and self.start != int(self.start):
            raise ValueError(f"start must be a whole number of {self.unit}s, got {self.start!r}: or unit='fraction'")

    def first_step(self, progress: Progress) -> float:
        return _in_steps(self.start, self.unit, progress)


def _in_steps(value: float, unit: PhaseUnit, progress: Progress) -> float:
    if unit == "step":
        return value
    if unit == "fraction":
        if progress.num_steps is None:
            raise ValueError(
                "a phase in fractions needs the number of steps: give num_steps (Lightning: max_steps, or max_epochs"
                " with a sized data loader), or the phase in steps"
            )
        return math.ceil(value * progress.num_steps)
    if value == 0:
        return 0
    if progress.steps_per_epoch is None:
        raise ValueError(
            "phases in epochs and in other units together need the number of steps in an epoch, which is unknown: give"
            " all phases in one unit"
        )
    return value * progress.steps_per_epoch


@configuration
class Schedule(Controller):
    """Changes compressors in phases. "8 bits for 500 steps, then 4, and 8 again for the last 5 %" is::

        Schedule([
            Phase(compressor=LoCo(bits=8)),
            Phase(compressor=LoCo(bits=4), start=500),
            Phase(compressor=LoCo(bits=8), start=0.95, unit="fraction"),
        ])

    Args:
        phases: All phases in the order of their starts. The first starts at 0.

    Raises:
        ValueError: Phases are out of order. If units differ, this is raised when training starts.
    """

    phases: Sequence[Phase] = field(kw_only=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        if not self.phases:
            raise ValueError("a schedule needs at least one phase")
        if self.phases[0].start != 0:
            raise ValueError(f"the first phase must start at 0, got {self.phases[0].start!r}")
        for at, (phase, following) in enumerate(pairwise(self.phases)):
            if phase.unit == following.unit:
                _check_order(at, phase.start, following.start)

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return tuple(phase.compressor for phase in self.phases)

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        return {"names": [spec.name for spec in specs], "phase": None}

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        if state["phase"] is None:
            self._check_phases(telemetry.progress)
        at = self._phase_at(telemetry.progress)
        names = state["names"]
        before = {} if state["phase"] is None else {name: int(state["phase"]) for name in names}
        levels = dict.fromkeys(names, at)
        phase = self.phases[at]
        reasons = dict.fromkeys(names, f"phase {at + 1} of {len(self.phases)}, from {phase.unit} {phase.start:g}")
        return Decision(
            state={"names": names, "phase": at}, levels=levels, switches=self.switches(before, levels, reasons)
        )

    def _check_phases(self, progress: Progress) -> None:
        """Check the order of phases in different units, now that the number of steps is known."""
        if len({phase.unit for phase in self.phases}) > 1:
            for at, (phase, following) in enumerate(pairwise(self.phases)):
                _check_order(at, phase.first_step(progress), following.first_step(progress))

    def _phase_at(self, progress: Progress) -> int:
        if all(phase.unit == "epoch" for phase in self.phases):
            return max(at for at, phase in enumerate(self.phases) if phase.start <= progress.known_epoch)
        return max(at for at, phase in enumerate(self.phases) if phase.first_step(progress) <= progress.step)


def _check_order(at: int, start: float, following: float) -> None:
    if following <= start:
        raise ValueError(
            f"phases {at + 1} and {at + 2} are out of order: the later one starts at {following:g}, not after {start:g}"
        )
