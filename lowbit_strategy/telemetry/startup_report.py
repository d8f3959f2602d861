"""The start-up report, which `plan` writes: what is compressed, what is not and why, bytes and memory."""

from __future__ import annotations

from lowbit_strategy import leaves
from lowbit_strategy.engine.engine import GradientSync

_REPORTS = "lowbit_strategy.plan.startup_report:render_reports"


def startup_report(sync: GradientSync) -> str:
    """The reports of an engine, one for each group of ranks that reduces parameters; empty if `plan` is missing."""
    rendered: str = leaves.load(_REPORTS, "the start-up report")(sync) if leaves.is_present(_REPORTS) else ""
    return rendered
