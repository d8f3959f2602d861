"""What a monitor measures, how often, and what it warns about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit_strategy.control.base import GroupBy
from lowbit_strategy.control.guard import Bounds
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import Conversion, Mismatch, Source, call, register_conversion


@configuration
class MonitorOptions:
    """The options of every monitor, in every framework.

    Args:
        every_n_steps: Optimizer steps from one observation to the next; nothing is measured between.
        group_by: Figures for each ``kind`` (the same layer of all blocks), ``module`` or ``parameter``, or by a
            function of the name.
        bounds: Warn when a group leaves them; None: no warnings.

    Raises:
        ValueError: A field is of another type, `every_n_steps` is not positive, or `group_by` is unknown.
    """

    every_n_steps: int = 50
    group_by: GroupBy = "kind"
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        check_positive("every_n_steps", self.every_n_steps)


def _make(value: Any, source: Source) -> MonitorOptions:
    """From true, or a mapping of the options."""
    if value is not True and not isinstance(value, Mapping):
        raise Mismatch
    return call(MonitorOptions, {} if value is True else value, source)


register_conversion(
    MonitorOptions, Conversion(_make, "MonitorOptions", "true or a mapping such as {every_n_steps: 50}")
)
