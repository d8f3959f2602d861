"""What a monitor measures, how often, and what it warns about."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit_strategy.control.groups import GroupBy, check_group_by
from lowbit_strategy.control.guard import Bounds


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorOptions:
    """The options of every monitor, in every framework.

    Args:
        every_n_steps: Optimizer steps from one observation to the next; nothing is measured between.
        group_by: Figures for each ``kind`` (the same layer of all blocks), ``module`` or ``parameter``, or by a
            function of the name.
        bounds: Warn when a group leaves them; None: no warnings.

    Raises:
        TypeError: `bounds` is not a `Bounds`.
        ValueError: `every_n_steps` is not positive, or `group_by` is unknown.
    """

    every_n_steps: int = 50
    group_by: GroupBy = "kind"
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.every_n_steps, int) or isinstance(self.every_n_steps, bool) or self.every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a positive integer, got {self.every_n_steps!r}")
        check_group_by(self.group_by)
        if self.bounds is not None and not isinstance(self.bounds, Bounds):
            raise TypeError(
                f"bounds must be lowbit_strategy.control.Bounds, such as Bounds(max_error=0.6), got {self.bounds!r}"
            )
