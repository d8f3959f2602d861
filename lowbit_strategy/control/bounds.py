"""Bounds on compression errors, for monitors and controllers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lowbit_strategy.control.base import State
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration


class Reading(NamedTuple):
    """One group's ||h - sent|| / ||h|| and ||residual|| / ||h||, where h is the gradient plus the residual."""

    relative_error: float
    residual_ratio: float
    end_to_end_error: float | None = None  # None: not measured


END_TO_END = "end-to-end error"


class Alarms(NamedTuple):
    """Groups out of bounds `patience` times, with reasons; groups that are within bounds again; the next state."""

    raised: Mapping[str, str]
    cleared: tuple[str, ...]
    state: State


@configuration
class Bounds:
    """Bounds on a group's error and residual.

    Args:
        max_error: Bound on the relative error; None: not checked. Two bits have about 0.5, four bits 0.1.
        max_residual: Bound on the residual's norm relative to gradient plus residual; None: not checked.
        max_end_to_end: Bound on the whole reduction's error, the result against the true mean over ranks; None: not
            checked. It is measured for the current level only, so a group that falls back because of it does not
            return.
        patience: Consecutive observations that raise or clear the alarm.

    Raises:
        ValueError: A field is out of range, or nothing is bounded.
    """

    max_error: float | None = None
    max_residual: float | None = None
    max_end_to_end: float | None = None
    patience: int = 3

    def __post_init__(self) -> None:
        names = ("max_error", "max_residual", "max_end_to_end")
        if all(getattr(self, name) is None for name in names):
            raise ValueError(f"give at least one of {', '.join(names)}: a guard without bounds guards nothing")
        for name in names:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} must be positive, got {value!r}")
        check_positive("patience", self.patience)

    def init(self) -> State:
        return {"counts": {}, "alarmed": {}}

    def update(self, readings: Mapping[str, Reading], state: State) -> Alarms:
        """Process one observation. ``counts`` holds the consecutive observations that contradict a group's state."""
        counts, alarmed = dict(state["counts"]), dict(state["alarmed"])
        raised, cleared = {}, []
        for group, reading in readings.items():
            reason = self._reason(reading)
            contrary = bool(reason) != (group in alarmed)
            counts[group] = counts.get(group, 0) + 1 if contrary else 0
            if counts[group] < self.patience:
                continue
            counts[group] = 0
            if reason:
                alarmed[group] = raised[group] = reason
            else:
                del alarmed[group]
                cleared.append(group)
        return Alarms(raised, tuple(cleared), {"counts": counts, "alarmed": alarmed})

    def _reason(self, reading: Reading) -> str:
        parts = []
        for what, value, bound in (
            ("relative error", reading.relative_error, self.max_error),
            ("residual", reading.residual_ratio, self.max_residual),
            (END_TO_END, reading.end_to_end_error, self.max_end_to_end),
        ):
            if bound is not None and value is not None and not value <= bound:  # NaN is out of bounds
                parts.append(f"{what} {value:.3g} > {bound:g}")
        return ", ".join(parts)
