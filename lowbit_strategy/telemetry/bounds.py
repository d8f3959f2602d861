"""Bounds on what compression does to groups of parameters, checked at every observation."""

from __future__ import annotations

import logging
from typing import Any

from lowbit_strategy.control.base import State
from lowbit_strategy.control.guard import Bounds, Reading
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.observe import Figures, Observation

_log = logging.getLogger("lowbit_strategy")


class BoundsObserver:
    """Finds the groups that have left their bounds, observation by observation; saved with the residuals.

    Args:
        sync: The engine that is observed.
        bounds: What a group's error and residual may be.
    """

    def __init__(self, sync: GradientSync, bounds: Bounds) -> None:
        self._rank = sync.ranks.rank
        self._bounds = bounds
        self._state: State = bounds.init()
        sync.save_with("bounds", self)

    def check(self, observation: Observation) -> list[str]:
        """A sentence for each group that leaves its bounds or is within them again; logged as a warning on rank 0."""
        readings = {group: _reading(figures) for group, figures in observation.groups.items()}
        verdict = self._bounds.update(readings, self._state)
        self._state = verdict.state
        times = f"{self._bounds.patience} times in a row"
        texts = [f"{group}: {reason}, {times}" for group, reason in verdict.raised.items()]
        texts += [f"{group}: within its bounds again" for group in verdict.cleared]
        for text in texts if self._rank == 0 else ():
            _log.warning("step %d: compression of %s", observation.step, text)
        return texts

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state


def _reading(figures: Figures) -> Reading:
    ratio = figures.residual_norm / figures.compensated_norm if figures.compensated_norm > 0 else 0.0
    return Reading(figures.relative_error, ratio, figures.end_to_end_error)
