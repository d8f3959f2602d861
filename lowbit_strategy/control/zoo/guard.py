"""Guard: warns when compression errors exceed bounds, and uses a lighter level until they are within bounds again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import Controller, Decision, Progress, State, Telemetry, describe, reference_nbytes
from lowbit_strategy.control.bounds import END_TO_END, Alarms, Bounds, Reading
from lowbit_strategy.control.grouping import GroupBy, group_of, grouped
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration


@configuration
class Guard(Controller):
    """Watches the levels that another controller chooses, and overrides them if errors are too large.

    Every `observe_every` steps the inner controller's levels are measured on gradients plus residuals. A group that is
    out of bounds `patience` times in a row gets `fallback`, and returns to the inner controller's level after
    `patience` good measurements.

    Args:
        inner: The controller to watch; ``Static(LoCo(bits=2))`` for a fixed compressor.
        bounds: Bounds on the errors.
        fallback: A lighter configuration; None: only warn.
        observe_every: Steps between two observations.
        group_by: How parameters are grouped; a group is judged and falls back together.

    Raises:
        ValueError: `fallback` is not lighter than the heaviest inner level, or a field is out of range.
    """

    inner: Controller
    bounds: Bounds
    fallback: Compressor | None = None
    observe_every: int = 50
    group_by: GroupBy = "kind"

    def __post_init__(self) -> None:
        if not self.inner.levels:
            raise ValueError("a guard needs a controller that chooses compressors")
        check_positive("observe_every", self.observe_every)
        if self.fallback is not None:
            heaviest = min(self.inner.levels, key=reference_nbytes)
            if reference_nbytes(self.fallback) <= reference_nbytes(heaviest):
                raise ValueError(
                    f"fallback {describe(self.fallback)} is not lighter than {describe(heaviest)}: choose one that"
                    " sends more bytes"
                )

    @property
    def levels(self) -> tuple[Compressor, ...]:
        return self.inner.levels if self.fallback is None else (*self.inner.levels, self.fallback)

    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        inner = self.inner.init(specs, world_size)
        return {"inner": inner, "bounds": self.bounds.init(), "levels": {}, "wanted": {}}

    def reads_accumulated(self, progress: Progress, state: State) -> bool:
        return self.inner.reads_accumulated(progress, state["inner"])

    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        inner = self.inner.decide(telemetry, state["inner"])
        readings = self._readings(telemetry, state["wanted"], state["bounds"]["alarmed"])
        alarms = self.bounds.update(readings, state["bounds"])
        alarmed = alarms.state["alarmed"]
        levels = dict(inner.levels)
        reasons: dict[str, str] = {}
        if self.fallback is not None:
            for name in levels:
                if (group := group_of(name, self.group_by)) in alarmed:
                    levels[name] = len(self.inner.levels)
                    reasons[name] = f"guard: {alarmed[group]}"
                elif group in alarms.cleared:
                    reasons[name] = "guard: within its bounds again"
        before = {
            name: state["levels"].get(name, level) if name in reasons else level for name, level in levels.items()
        }
        observed = inner.levels if telemetry.progress.step % self.observe_every == 0 else {}
        probe = replace(
            inner.probe,
            levels=tuple(sorted({*inner.probe.levels, *observed.values()})),
            end_to_end=inner.probe.end_to_end or (bool(observed) and self.bounds.max_end_to_end is not None),
        )
        return replace(
            inner,
            state={"inner": inner.state, "bounds": alarms.state, "levels": levels, "wanted": dict(observed)},
            levels=levels,
            probe=probe,
            switches=(*inner.switches, *self.switches(before, levels, reasons)),
            warnings=(*inner.warnings, *self._warnings(alarms)),
        )

    def _readings(
        self, telemetry: Telemetry, wanted: Mapping[str, int], alarmed: Mapping[str, str]
    ) -> dict[str, Reading]:
        """The reading of each group that was measured in the last step."""
        readings = {}
        names = [name for name, level in wanted.items() if name in telemetry.energy.get(level, {})]
        for group, members in grouped(names, self.group_by).items():
            energies = [telemetry.energy[wanted[name]][name] for name in members]
            compensated = sum(energy.compensated for energy in energies)
            if compensated > 0:
                error = sum(energy.error for energy in energies)
                residual = sum(telemetry.residual_norm.get(name, 0.0) ** 2 for name in members)
                both_hops = (
                    math.inf  # unknown for a level that is not in use
                    if END_TO_END in alarmed.get(group, "") and self.fallback is not None
                    else _end_to_end_error(telemetry, members)
                )
                readings[group] = Reading(math.sqrt(error / compensated), math.sqrt(residual / compensated), both_hops)
        return readings

    def _warnings(self, alarms: Alarms) -> tuple[str, ...]:
        what = "falls back to " + describe(self.fallback) if self.fallback is not None else "only watched"
        times = f"{self.bounds.patience} times in a row; {what}"
        raised = (f"{group}: {reason} {times}" for group, reason in alarms.raised.items())
        return (*raised, *(f"{group}: within its bounds again" for group in alarms.cleared))


def _end_to_end_error(telemetry: Telemetry, names: Sequence[str]) -> float | None:
    """``||result - mean|| / ||mean||`` of several parameters together; None: not measured."""
    sums = [telemetry.end_to_end[name] for name in names if name in telemetry.end_to_end]
    mean = sum(each.mean for each in sums)
    return math.sqrt(sum(each.error for each in sums) / mean) if mean > 0 else None
