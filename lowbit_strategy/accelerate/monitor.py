"""The monitor's configuration: what is measured, how often, and what is said to be too much."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit_strategy.control.groups import GroupBy
from lowbit_strategy.control.guard import Bounds
from lowbit_strategy.telemetry.custom_loop import check_monitor


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionMonitor:
    """Log what compression does: error, cosine, residual, bits, bytes and milliseconds, as ``lowbit/...``.

    Args:
        every_n_steps: Optimizer steps from one observation to the next; nothing happens between.
        group_by: Figures for each ``kind`` (the same layer of all blocks), ``module`` or ``parameter``, or by a
            function of the name.
        bounds: Warn of groups that are out of these.

    Raises:
        TypeError: `bounds` are none.
        ValueError: A field is out of range.
    """

    every_n_steps: int = 50
    group_by: GroupBy = "kind"
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        check_monitor(self.every_n_steps, self.group_by)
        if self.bounds is not None and not isinstance(self.bounds, Bounds):
            raise TypeError(f"bounds must be lowbit_strategy.control.Bounds, got {self.bounds!r}")
