"""The options of monitors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from lowbit_strategy.control.bounds import Bounds
from lowbit_strategy.control.grouping import GroupBy
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import Mismatch, call, register_conversion


@configuration
class MonitorOptions:
    """The options of every monitor, in every framework. A monitor takes an instance, or its arguments.

    Args:
        every_n_steps: Optimizer steps between observations; nothing is measured in between. An observation costs about
            as much as the compression of one step.
        group_by: Groups parameters by ``kind`` (the same layer of all blocks), ``module`` or ``parameter``, or by a
            function of the name.
        bounds: Limits; a warning says when a group leaves them. None: no warnings.

    Raises:
        ValueError: A field has the wrong type, `every_n_steps` is not positive, or `group_by` is unknown.
    """

    every_n_steps: int = field(default=50, kw_only=False)
    group_by: GroupBy = "kind"
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        check_positive("every_n_steps", self.every_n_steps)

    @classmethod
    def of(cls, *options: Any, **more: Any) -> MonitorOptions:
        """Make options from a monitor's arguments: an instance, or its fields."""
        if options and isinstance(options[0], cls) and not (options[1:] or more):
            return options[0]
        return cls(*options, **more)


def _make(value: Any) -> MonitorOptions:
    """Make options from true, or from a mapping."""
    if value is not True and not isinstance(value, Mapping):
        raise Mismatch
    return call(MonitorOptions, {} if value is True else value)


register_conversion(MonitorOptions, _make, "MonitorOptions(), true or a mapping such as {every_n_steps: 50}")
