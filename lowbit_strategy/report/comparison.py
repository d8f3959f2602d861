"""A run beside another one: losses at the last step that both have, bytes, time, and what is configured otherwise."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from lowbit_strategy.options.sizes import size
from lowbit_strategy.report.formats import number
from lowbit_strategy.report.run import GRADIENTS, WEIGHTS, Run, Series


class Row(NamedTuple):
    """One figure of both runs; ``change`` is that of the run against the baseline."""

    name: str
    run: str
    baseline: str
    change: str = ""


def compare(run: Run, baseline: Run) -> list[Row]:
    """Everything that both runs know."""
    rows = []
    ours, theirs = run.losses(), baseline.losses()
    for name in ours.keys() & theirs.keys():
        if row := _loss_row(name, ours[name], theirs[name]):
            rows.append(row)
    rows.sort(key=lambda row: "val" not in row.name)
    for name, keys in (("gradients sent", (GRADIENTS,)), ("weights sent", (WEIGHTS,))):
        mine, other = (_mean(each, keys) for each in (run, baseline))
        if mine and other:
            rows.append(Row(f"{name}, per rank and step", size(mine), size(other), f"{other / mine:.1f}x fewer"))
    if run.timed and baseline.timed:
        mine, other = (statistics.median(line["step_ms"] for line in each.timed) for each in (run, baseline))
        rows.append(Row("step time, median", f"{mine:,.0f} ms", f"{other:,.0f} ms", f"{mine / other - 1:+.1%}"))
    return rows


def _loss_row(name: str, ours: Series, theirs: Series) -> Row | None:
    last = min(ours.steps[-1], theirs.steps[-1])
    mine, other = (series.smooth().at(last) for series in (ours, theirs))
    if mine is None or other is None:
        return None
    return Row(
        f"{name} at step {last:,}", number(mine, 4), number(other, 4), f"{mine / other - 1:+.2%}" if other else ""
    )


def _mean(run: Run, keys: tuple[str, ...]) -> float:
    return statistics.fmean(sum(line.get(key) or 0.0 for key in keys) for line in run.observations or [{}])


def configuration(run: Run, baseline: Run | None = None) -> list[Row]:
    """How the run is configured; with a baseline, what differs is marked as a change."""
    mine, other = _settings(run), _settings(baseline) if baseline is not None else {}
    return [
        Row(
            name,
            mine.get(name, ""),
            other.get(name, ""),
            "differs" if other and mine.get(name) != other.get(name) else "",
        )
        for name in mine | other
    ]


def _settings(run: Run) -> dict[str, str]:
    """The record's first line but for what belongs to its form."""
    start = {key: value for key, value in run.start.items() if key not in ("kind", "step", "time")}
    nested = start.pop("configuration", None) or {}
    return {key: str(value) for key, value in (start | nested).items() if value is not None}
