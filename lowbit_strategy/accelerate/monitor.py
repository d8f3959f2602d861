"""The monitor's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.options.conversion import Conversion, Mismatch, Source, call, register_conversion
from lowbit_strategy.telemetry.monitor_options import MonitorOptions


@configuration
class CompressionMonitor(MonitorOptions):
    """Log what compression does: error, cosine, residual, bits, bytes and milliseconds, as ``lowbit/...``.

    Args:
        every_n_steps: Optimizer steps from one observation to the next; nothing is measured between.
        group_by: Figures for each ``kind`` (the same layer of all blocks), ``module`` or ``parameter``, or by a
            function of the name.
        bounds: Warn when a group leaves them.

    Raises:
        ValueError: A field is of another type or out of range.
    """


def _make(value: Any, source: Source) -> CompressionMonitor:
    """From true, or a mapping of the options."""
    if value is not True and not isinstance(value, Mapping):
        raise Mismatch
    return call(CompressionMonitor, {} if value is True else value, source)


register_conversion(
    CompressionMonitor, Conversion(_make, "a CompressionMonitor", "true or a mapping such as {every_n_steps: 50}")
)
