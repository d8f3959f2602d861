"""What a rank has measured in its last step: ranks add it up when the next one begins, also after a resume."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.telemetry.measure import StepMeasure

STATE_KEY = "last step"


class LastStep:
    """This rank's figures of the last step that counted.

    Args:
        sync: The engine.

    Attributes:
        names: Parameters that it measured; None: there is no such step.
        seconds: How long it took on this rank; None: there is none before it.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self.forget()
        sync.save_parts(STATE_KEY, self)

    def forget(self) -> None:
        """Nothing has been measured."""
        self.names: list[str] | None = None
        self.seconds: float | None = None
        self._measure = StepMeasure(self._sync)

    def keep(self, measure: StepMeasure, seconds: float | None) -> None:
        """The step has ended, on this rank."""
        self.names, self._measure, self.seconds = list(self._sync.specs), measure, seconds

    def summed(self, widths: Mapping[Any, int]) -> tuple[dict[Any, Tensor], float]:
        """The sums of `StepMeasure.summed`, and the mean of the seconds. Call on all ranks."""
        assert self.names is not None
        sums, (seconds,) = self._measure.summed(widths, [self.seconds or 0.0], names=self.names)
        return sums, seconds

    # -- saving -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        rows = {figure: dict(each) for figure, each in self._measure.rows.items()}
        world = self._sync.ranks.world
        return {"names": self.names, "seconds": self.seconds, "rows": rows, "place": [world.rank, world.world_size]}

    def load_state_dict(self, states: Iterable[Mapping[str, Any]]) -> None:
        """If the layout has changed, the first rank takes what all have measured."""
        self.forget()
        rest = iter(states)
        own = next(rest)
        self.names, self.seconds = own["names"], own["seconds"]
        world, sync = self._sync.ranks.world, self._sync
        if self.names is None:
            return
        if own["place"] == [world.rank, world.world_size]:
            rest = iter([own])
        elif sync.ranks.rank:
            return
        for each in rest:
            for figure, rows in each["rows"].items():
                self._add(figure, rows)

    def _add(self, figure: Hashable, rows: Mapping[str, Tensor]) -> None:
        own, device = self._measure.rows[figure], self._sync.device
        for name, row in rows.items():
            own[name] = row.to(device, copy=True) if name not in own else own[name] + row.to(device)
