"""Outcomes on disk: one file per part, written after each check, and one page of all parts to attach to an issue."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance import machine

COLORS = {"passed": "#d9f2d9", "failed": "#f8d0d0", "not run": "#f8d0d0", "running": "#f8d0d0", "left out": "#eeeeee"}


class Record:
    """The outcomes of one part.

    Args:
        folder: Of the run.
        part: Its name, with a number in front that orders the parts.
        fresh: Forget what an earlier run has written.
    """

    def __init__(self, folder: Path, part: str, *, fresh: bool) -> None:
        self.path = folder / f"{part}.json"
        self.checks: dict[str, dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if not fresh and self.path.exists():
            self.checks = {check["name"]: check for check in json.loads(self.path.read_text())["checks"]}

    def get(self, name: str) -> dict[str, Any] | None:
        return self.checks.get(name)

    def put(self, outcome: dict[str, Any]) -> None:
        self.checks[outcome["name"]] = outcome
        content = {"machine": machine.describe(), "checks": list(self.checks.values())}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1, default=str) + "\n")
        os.replace(new, self.path)

    def fail_unfinished(self, why: str) -> list[str]:
        """What was under way when its process ended has failed. Returns the names."""
        names = [name for name, check in self.checks.items() if check["status"] == "running"]
        for name in names:
            self.put({**self.checks[name], "status": "failed", "why": why})
        return names


def collect(folder: Path) -> dict[str, Any]:
    """All parts."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*_*.json"))}
    checks = [check for part in parts.values() for check in part["checks"]]
    counts = {status: sum(check["status"] == status for check in checks) for status in COLORS}
    return {"machine": machine.describe(), "counts": counts, "parts": parts, "line": benchmark_line(parts)}


def write_page(folder: Path) -> dict[str, Any]:
    """``results.json`` and ``results.html``; returns the content."""
    found = collect(folder)
    (folder / "results.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    (folder / "results.html").write_text(render(found))
    return found


def benchmark_line(parts: dict[str, Any]) -> str:
    """A row for the table of GPUs in docs/benchmarks.md: figures of checks that have passed."""
    figures: dict[str, Any] = {}
    for part in parts.values():
        for check in part["checks"]:
            if check["status"] == "passed":
                figures |= {f"{check['name']}: {key}": value for key, value in check["figures"].items()}
    here = machine.describe()
    wanted = ("copy_gb_per_s", "loco_share_of_copy", "step_of_stock", "peak_of_stock")
    cells = [_short(next((v for k, v in figures.items() if k.endswith(f": {name}")), "-")) for name in wanted]
    return f"| {here['device']} x {max(1, here['devices'])} | {here['torch']} | {' | '.join(cells)} |"


def render(found: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in found["counts"].items() if count)
    where = ", ".join(f"{key} {value}" for key, value in found["machine"].items())
    rows = []
    for name, part in found["parts"].items():
        rows.append(f"<tr><th colspan=4>{html.escape(name)}</th></tr>")
        for check in part["checks"]:
            figures = ", ".join(f"{key} {_short(value)}" for key, value in check["figures"].items())
            why = check["why"][-600:] or ("its process has not ended it" if check["status"] == "running" else "")
            cells = (check["name"], check["status"], check["seconds"], figures or why)
            row = "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells)
            rows.append(f'<tr style="background:{COLORS[check["status"]]}">{row}</tr>')
    return (
        "<!doctype html><meta charset=utf-8><title>GPU acceptance</title>"
        "<style>body{font:14px sans-serif;max-width:70em;margin:2em auto}td,th{padding:3px 8px;text-align:left;"
        "vertical-align:top}table{width:100%}th{white-space:nowrap}td:first-child{width:22%}"
        "td:nth-child(2),td:nth-child(3){white-space:nowrap}td:last-child{overflow-wrap:anywhere;"
        "white-space:pre-line}pre{overflow-x:auto}</style>"
        f"<h1>GPU acceptance{'' if found['machine']['devices'] else ': no GPU, what a CPU shows'}</h1>"
        f"<p>{html.escape(where)}</p><p><b>{html.escape(counts)}</b></p>"
        "<table><tr><th>check</th><th>outcome</th><th>seconds</th><th>figures, or why</th></tr>"
        f"{''.join(rows)}</table><h2>For docs/benchmarks.md</h2>"
        "<pre>| GPUs | torch | copy GB/s | LoCo encode, share of a copy | step of stock | peak of stock |\n"
        f"|---|---|---|---|---|---|\n{html.escape(found['line'])}</pre>\n"
    )


def _short(value: Any) -> str:
    """A figure in a few characters; rows of figures each in a line of its own."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        lines = [_short(each) for each in value]
        return "".join(f"\n{line}" for line in lines) if any(isinstance(e, dict) for e in value) else " ".join(lines)
    return str(value)
