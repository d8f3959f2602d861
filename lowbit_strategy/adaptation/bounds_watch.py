"""Watches whether the groups of a monitor stay within their bounds."""

from __future__ import annotations

import logging

from lowbit_strategy.control.base import State
from lowbit_strategy.control.bounds import Bounds
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.observe import Observation

_log = logging.getLogger("lowbit_strategy")


class BoundsWatch:
    """Its state, how often groups were out of bounds, is saved with the residuals."""

    def __init__(self, bounds: Bounds, sync: GradientSync) -> None:
        self._bounds, self._sync = bounds, sync
        self._state = bounds.init()
        sync.save_with("bounds", self)

    def observe(self, observation: Observation) -> list[str]:
        """Return a sentence for each group that leaves its bounds or returns within them. Rank 0 warns."""
        readings = {group: each.reading for group, each in observation.groups.items()}
        found = self._bounds.update(readings, self._state)
        self._state = found.state
        times = f"{self._bounds.patience} times in a row"
        texts = [f"{group}: {reason}, {times}" for group, reason in found.raised.items()]
        texts += [f"{group}: within its bounds again" for group in found.cleared]
        for text in texts if self._sync.ranks.logs else ():
            _log.warning("step %d: compression of %s", observation.step, text)
        return texts

    def state_dict(self) -> State:
        return self._state

    def load_state_dict(self, state: State) -> None:
        self._state = state
