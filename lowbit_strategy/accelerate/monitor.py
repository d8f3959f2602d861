"""The monitor's configuration."""

from __future__ import annotations

from dataclasses import dataclass

from lowbit_strategy.telemetry.monitor_options import MonitorOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressionMonitor(MonitorOptions):
    """Log what compression does: error, cosine, residual, bits, bytes and milliseconds, as ``lowbit/...``.

    Args:
        every_n_steps: Optimizer steps from one observation to the next; nothing is measured between.
        group_by: Figures for each ``kind`` (the same layer of all blocks), ``module`` or ``parameter``, or by a
            function of the name.
        bounds: Warn when a group leaves them.

    Raises:
        TypeError: `bounds` is not a `Bounds`.
        ValueError: A field is out of range.
    """
