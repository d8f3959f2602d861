"""The page: headline figures, charts, tables; one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import io
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from lowbit_strategy.report.charts import draw_all, size
from lowbit_strategy.report.run import Run

_MAX_SWITCHES = 40
_RUNNING_S = 600  # a record that has not grown for so long is taken for a finished run's
_TITLES = {
    "loss": (
        "Loss, and what compressed it",
        "Dashed line: a decision. Orange line: a warning. Below: share of all elements at each level.",
    ),
    "error": ("Compression error", "||what was to be said - what was sent|| / ||what was to be said||, by group."),
    "bits": ("Bits on the wire", "For one element and hop; an uncompressed float32 has 32."),
    "bytes": ("Bytes", "Sent by one rank; between observed steps taken to be as in the last one."),
    "time": ("Time", "Of one step, mean over ranks. Waiting overlaps with backward under DDP."),
}


class Tile(NamedTuple):
    name: str
    value: str
    note: str
    alert: bool = False


def write_report(run: Run, out: Path) -> Path:
    """Write ``index.html`` and the charts as PNG files into `out`; returns the page's path."""
    out.mkdir(parents=True, exist_ok=True)
    charts = []
    for stem, figure in draw_all(run).items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=170)
        (out / f"{stem}.png").write_bytes(buffer.getvalue())
        title, note = _TITLES[stem]
        png = base64.b64encode(buffer.getvalue()).decode()
        if stem == "loss" and not run.levels:
            title, note = "Loss", ""
        charts.append({"title": title, "note": note, "png": png, "wide": stem == "loss"})
    page = out / "index.html"
    page.write_text(_template().render(charts=charts, **_content(run)), encoding="utf-8")
    return page


def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("lowbit_strategy.report", package_path="")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("page.html.j2")


def _content(run: Run) -> dict[str, Any]:
    shown = run.switches[-_MAX_SWITCHES:]
    hidden = len(run.switches) - len(shown)
    return {
        "title": f"lowbit report: {run.folder.name}",
        "headline": f"Compression report: {run.folder.resolve().name}",
        "facts": _facts(run),
        "tiles": _tiles(run),
        "groups": _group_rows(run),
        "observed_step": run.observations[-1]["step"] if run.observations else 0,
        "warnings": run.warnings,
        "switches": shown,
        "switches_note": f"{len(run.switches)} in all" + (f"; the last {len(shown)} are shown." if hidden else "."),
    }


def _facts(run: Run) -> list[str]:
    start = run.start
    facts = []
    if "strategy" in start:
        facts.append(str(start["strategy"]))
    if "world_size" in start:
        facts.append(f"{start['world_size']} ranks, {start['layout']}")
    planned = f" of {start['num_steps']:,}" if start.get("num_steps") else ""
    facts.append(f"step {run.last_step:,}{planned}")
    times = [line["time"] for line in (*run.starts, *run.observations, *run.levels, *run.validations)]
    if times:
        last = datetime.fromtimestamp(max(times), tz=timezone.utc)
        quiet = (datetime.now(tz=timezone.utc) - last).total_seconds() > _RUNNING_S
        facts.append(f"{'last written' if quiet else 'written'} {last:%Y-%m-%d %H:%M} UTC")
        facts.append(f"{(max(times) - min(times)) / 60:.1f} minutes recorded")
    return facts


def _tiles(run: Run) -> list[Tile]:
    tiles = []
    sent, dense = run.bytes_so_far()
    if sent and sent.values[-1] and dense.values[-1]:
        ratio = dense.values[-1] / sent.values[-1]
        saved = size(dense.values[-1] - sent.values[-1])
        tiles.append(Tile("fewer bytes", f"{ratio:.1f}x", f"than float32: {saved} saved a rank"))
    if run.observations:
        last = run.observations[-1]["total"]
        tiles.append(Tile("bits an element", _number(last["bits_per_element"], 3), "now, on each hop"))
        tiles.append(Tile("relative error", _number(last["relative_error"], 2), f"cosine {_number(last['cosine'], 3)}"))
    if timed := [line for line in run.observations if line["step_ms"] is not None]:
        share = sum(line["codec_ms"] for line in timed) / sum(line["step_ms"] for line in timed)
        waiting = sum(line["comm_ms"] for line in timed) / sum(line["step_ms"] for line in timed)
        tiles.append(Tile("compression", f"{share:.1%}", f"of the time; {waiting:.0%} waiting for bytes"))
    for name, series in run.losses().items():
        if series:
            tiles.append(Tile(name, _number(series.values[-1], 4), f"at step {series.steps[-1]:,}"))
    if run.switches:
        last_switch = run.switches[-1]["step"]
        tiles.append(Tile("decisions", str(len(run.switches)), f"the last at step {last_switch:,}"))
    if run.warnings:
        tiles.append(Tile("warnings", str(len(run.warnings)), f"the last at step {run.warnings[-1]['step']:,}", True))
    return tiles


def _group_rows(run: Run) -> list[dict[str, Any]]:
    if not run.observations:
        return []
    groups = run.observations[-1]["groups"]
    total = sum(figures["wire_nbytes"] for figures in groups.values()) or 1.0
    rows = []
    for name, figures in sorted(groups.items(), key=lambda item: -item[1]["numel"]):
        share = figures["wire_nbytes"] / total
        gradient, residual = figures["compensated_norm"], figures["residual_norm"]
        rows.append(
            {
                "name": name,
                "compressed": figures["compressed"],
                "method": figures["method"] if figures["compressed"] else f"{figures['method']}, exempt",
                "numel": f"{figures['numel']:,}",
                "bits": _number(figures["bits_per_element"], 3),
                "share": f"{share:.1%}",
                "bar": round(90 * share),
                "error": _number(figures["relative_error"], 2),
                "cosine": _number(figures["cosine"], 3),
                "residual": _number(residual / gradient if gradient and residual is not None else None, 2),
            }
        )
    return rows


def _number(value: float | None, digits: int) -> str:
    return "not finite" if value is None else f"{value:.{digits}g}"
