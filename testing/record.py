"""The record that a run leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbit_strategy.report.record import read_runs


def read_record(folder: str | Path) -> list[dict[str, Any]]:
    """All lines of the last run in `folder`."""
    return read_runs(folder)[-1]
