"""The report's page: headline figures, charts and tables in one self-contained HTML file."""

from __future__ import annotations

import base64
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from lowbit_strategy.options.sizes import size
from lowbit_strategy.report.charts import draw_all
from lowbit_strategy.report.run import DENSE_GRADIENTS, DENSE_WEIGHTS, GRADIENTS, WEIGHTS, Run

_MAX_SWITCHES = 40
_TITLES = {
    "loss": (
        "Loss, and what compressed it",
        "Dashed vertical line: a decision. Orange: a warning. At the bottom: the share of all elements at each level.",
    ),
    "error": ("Compression error", "||h - sent|| / ||h|| by group, where h is the gradient plus the residual."),
    "bits": ("Bits on the wire", "Per element each time it is sent; uncompressed float32 has 32."),
    "bytes": ("Bytes", "Between observed steps as in the last one."),
    "time": ("Time", "Mean over ranks. Under DDP, waiting overlaps with backward."),
}
_GRADIENTS_ONLY = "Gradients only: the bytes of weights, which FSDP2 gathers in every step, are not in this record."


class Tile(NamedTuple):
    name: str
    value: str
    note: str
    alert: bool = False


def write_report(run: Run, out: Path) -> Path:
    """Write ``index.html`` and the charts as PNG files into `out`; returns the page's path.

    Args:
        run: The run to show.
        out: The folder, made if it does not exist.
    """
    out.mkdir(parents=True, exist_ok=True)
    charts = []
    for stem, figure in draw_all(run).items():
        picture = out / f"{stem}.png"
        figure.savefig(picture, dpi=170)
        title, note = _title(stem, run)
        charts.append(
            {"title": title, "note": note, "png": base64.b64encode(picture.read_bytes()).decode(), "stem": stem}
        )
    loader = jinja2.PackageLoader("lowbit_strategy.report", package_path="")
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    pages.filters["number"] = number
    template = pages.get_template("page.html.j2")
    page = out / "index.html"
    page.write_text(template.render(charts=charts, **_content(run)), encoding="utf-8")
    return page


def _title(stem: str, run: Run) -> tuple[str, str]:
    title, note = _TITLES[stem]
    if stem == "loss" and not run.levels:
        return "Loss", ""
    if stem == "bytes" and not run.counts_weights and run.start.get("layout") == "reduce-scatter":
        note = f"{note} {_GRADIENTS_ONLY}"
    return title, note


def _content(run: Run) -> dict[str, Any]:
    shown = run.switches[-_MAX_SWITCHES:]
    hidden = len(run.switches) - len(shown)
    return {
        "title": f"lowbit report: {_name(run)}",
        "headline": f"Compression report: {_name(run)}",
        "facts": _facts(run),
        "tiles": _tiles(run),
        "observed": run.observations[-1] if run.observations else {"groups": {}},
        "warnings": run.warnings,
        "members": run.members,
        "configuration": _settings(run),
        "switches": shown,
        "switches_note": f"{len(run.switches)} in all" + (f"; the last {len(shown)} are shown." if hidden else "."),
    }


def _name(run: Run) -> str:
    """The run's folder and its parent, since many runs are called version_0."""
    return "/".join(run.folder.resolve().parts[-2:])


def _facts(run: Run) -> list[str]:
    start = run.start
    facts = []
    if "strategy" in start:
        facts.append(str(start["strategy"]))
    if "world_size" in start:
        ranks = f"{start['world_size']} ranks"
        levels = start.get("ranks", ranks)
        facts.append(f"{ranks}, {start['layout']}" + (f", {levels}" if levels != ranks else ""))
    planned = f" of {start['num_steps']:,}" if start.get("num_steps") else ""
    facts.append(f"step {run.last_step:,}{planned}")
    times = [line["time"] for line in (*run.starts, *run.observations, *run.levels, *run.validations)]
    if times:
        facts.append(f"last written {datetime.fromtimestamp(max(times), tz=timezone.utc):%Y-%m-%d %H:%M} UTC")
        facts.append(f"{(max(times) - min(times)) / 60:.1f} minutes recorded")
    return facts


def _tiles(run: Run) -> list[Tile]:
    tiles = []
    sent, dense = run.bytes_so_far(GRADIENTS, WEIGHTS), run.bytes_so_far(DENSE_GRADIENTS, DENSE_WEIGHTS)
    if sent and sent.values[-1] and dense.values[-1]:
        what = "gradients and weights" if run.counts_weights else "gradients"
        ratio = dense.values[-1] / sent.values[-1]
        total = f"{size(sent.values[-1])} of {size(dense.values[-1])} per rank"
        tiles.append(Tile("fewer bytes", f"{ratio:.1f}x", f"{what}: {total}"))
    if run.observations:
        last = run.observations[-1]["total"]
        tiles.append(Tile("bits per element", number(last["bits_per_element"], 3), "in the last observation"))
        tiles.append(Tile("relative error", number(last["relative_error"], 2), f"cosine {number(last['cosine'], 3)}"))
    if timed := run.timed:
        share = sum(line["codec_ms"] for line in timed) / sum(line["step_ms"] for line in timed)
        waiting = sum(line["comm_ms"] for line in timed) / sum(line["step_ms"] for line in timed)
        tiles.append(Tile("compression", f"{share:.1%}", f"of the time; {waiting:.0%} waiting for bytes"))
    for name, series in run.losses().items():
        if series:
            tiles.append(Tile(name, number(series.values[-1], 4), f"at step {series.steps[-1]:,}"))
    if run.switches:
        last_switch = run.switches[-1]["step"]
        tiles.append(Tile("decisions", str(len(run.switches)), f"the last at step {last_switch:,}"))
    if run.members:
        joins, losses = (sum(len(line[key]) for line in run.members[1:]) for key in ("joined", "lost"))
        tiles.append(Tile("replicas", str(len(run.members[-1]["members"])), f"{joins} joined, {losses} lost"))
    if run.warnings:
        tiles.append(Tile("warnings", str(len(run.warnings)), f"the last at step {run.warnings[-1]['step']:,}", True))
    return tiles


def _settings(run: Run) -> dict[str, str]:
    """The record's first line without its technical fields."""
    start = {key: value for key, value in run.start.items() if key not in ("kind", "step", "time")}
    nested = start.pop("configuration", None) or {}
    return {key: str(value) for key, value in (start | nested).items() if value is not None}


def number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"
