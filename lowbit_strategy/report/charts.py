"""The report's charts, one function each, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lowbit_strategy.report.run import Run, Series

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B")
_INK, _FAINT = "#1f2933", "#9aa5b1"
_MAX_GROUPS = 8
_STYLE: Any = {  # keys are a literal type of matplotlib's stubs
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": "#52606d",
    "ytick.color": "#52606d",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def draw_all(run: Run) -> dict[str, Figure]:
    """All charts that the run has data for, by file stem, in reading order."""
    figures = {}
    with matplotlib.rc_context(_STYLE):
        for stem, draw in _CHARTS.items():
            if (figure := draw(run)) is not None:
                figures[stem] = figure
    return figures


def _new(
    rows: int = 1, width: float = 6.0, height: float = 3.6, ratios: list[float] | None = None
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    return figure, list(axes)


def _finish(axes: Axes, run: Run, ylabel: str) -> None:
    axes.set_ylabel(ylabel)
    axes.set_xlim(0, max(run.last_step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0)


def _smooth(series: Series, width: int) -> Series:
    values = series.values
    means = [
        sum(values[max(0, at - width + 1) : at + 1]) / (at - max(0, at - width + 1) + 1) for at in range(len(values))
    ]
    return Series(series.steps, means)


def draw_loss(run: Run) -> Figure | None:
    """Loss curves over a band that shows which share of the model each level has."""
    curves = run.losses()
    if not curves and not run.levels:
        return None
    if run.levels:
        figure, (top, band) = _new(2, 11.6, 4.6, [3.4, 1])
        _draw_levels(band, run)
    else:
        figure, (top,) = _new(1, 11.6, 3.6)
    for color, (name, series) in zip(_COLORS, curves.items(), strict=False):
        many = len(series.steps) > 60
        top.plot(series.steps, series.values, color=color, alpha=0.25 if many else 1.0, label=None if many else name)
        if many:
            smooth = _smooth(series, len(series.steps) // 40)
            top.plot(smooth.steps, smooth.values, color=color, label=name)
        if "val" in name:
            top.plot(series.steps, series.values, "o", color=color, markersize=4)
    for step in sorted({line["step"] for line in run.switches} - {0}):
        top.axvline(step, color=_FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    for line in run.warnings:
        top.axvline(line["step"], color="#D55E00", linewidth=1.2, zorder=0)
    if curves:
        top.legend(loc="upper right")
    _finish(top, run, "loss")
    figure.axes[-1].set_xlabel("optimizer step")
    return figure


def _draw_levels(axes: Axes, run: Run) -> None:
    labels = run.levels[-1]["labels"]
    shades = [matplotlib.colormaps["viridis"](0.15 + 0.75 * at / max(len(labels) - 1, 1)) for at in range(len(labels))]
    ends = [*(line["step"] for line in run.levels[1:]), max(run.last_step, run.levels[-1]["step"] + 1)]
    for line, end in zip(run.levels, ends, strict=True):
        bottom = 0.0
        for label, shade in zip(labels, shades, strict=True):
            share = line["shares"].get(label, 0.0)
            axes.fill_between([line["step"], end], bottom, bottom + share, color=shade, linewidth=0)
            bottom += share
    for label, shade in zip(labels, shades, strict=True):
        axes.fill_between([], [], color=shade, label=label)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.5), ncols=min(len(labels), 3), handlelength=1.2)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_yticks([0, 0.5, 1])
    axes.grid(False)
    _finish(axes, run, "of elements")


def _draw_groups(run: Run, key: str, ylabel: str, floor: float | None = None) -> Figure | None:
    if not run.observations:
        return None
    figure, (axes,) = _new(height=4.2)
    for color, name in zip(_COLORS, run.groups[:_MAX_GROUPS], strict=False):
        series = run.group(name, key)
        axes.plot(series.steps, series.values, color=color, linewidth=1.3, label=_short(name))
    total = run.total(key)
    axes.plot(total.steps, total.values, color=_INK, linewidth=2.6, label="all parameters")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, columnspacing=1.4, handlelength=1.4)
    if floor is not None:
        axes.set_ylim(bottom=floor)
    _finish(axes, run, ylabel)
    axes.set_xlabel("optimizer step")
    return figure


def _short(name: str, length: int = 30) -> str:
    return name if len(name) <= length else "..." + name[-(length - 3) :]


def draw_error(run: Run) -> Figure | None:
    return _draw_groups(run, "relative_error", "relative error", 0.0)


def draw_bits(run: Run) -> Figure | None:
    return _draw_groups(run, "bits_per_element", "bits an element", 0.0)


def draw_bytes(run: Run) -> Figure | None:
    """Bytes sent so far, beside what uncompressed gradients would have taken."""
    sent, dense = run.bytes_so_far()
    if not sent or not dense.values[-1]:
        return None
    figure, (axes,) = _new()
    axes.fill_between(dense.steps, sent.values, dense.values, color=_COLORS[0], alpha=0.12, linewidth=0, label="saved")
    axes.plot(dense.steps, dense.values, color=_FAINT, label="uncompressed float32")
    axes.plot(sent.steps, sent.values, color=_COLORS[0], label="sent")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    figure.legend(loc="outside lower center", ncols=3)
    axes.set_ylim(bottom=0)
    _finish(axes, run, "a rank, so far")
    axes.set_xlabel("optimizer step")
    return figure


def draw_time(run: Run) -> Figure | None:
    """Where the step's time goes: methods, waiting for bytes, everything else."""
    lines = [line for line in run.observations if line["step_ms"] is not None]
    if len(lines) < 2:
        return None
    figure, (axes,) = _new()
    steps = [line["step"] for line in lines]
    codec = [line["codec_ms"] for line in lines]
    waiting = [line["comm_ms"] for line in lines]
    other = [max(line["step_ms"] - line["codec_ms"] - line["comm_ms"], 0.0) for line in lines]
    axes.stackplot(
        steps,
        other,
        waiting,
        codec,
        colors=("#d5dbe1", _COLORS[5], _COLORS[1]),
        labels=("everything else", "waiting for bytes", "compression"),
        linewidth=0,
    )
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3)
    typical = sorted(line["step_ms"] for line in lines)[len(lines) // 2]
    axes.set_ylim(0, 2 * typical)
    _finish(axes, run, "ms a step")
    axes.set_xlabel("optimizer step")
    return figure


def size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


_CHARTS: dict[str, Callable[[Run], Figure | None]] = {
    "loss": draw_loss,
    "error": draw_error,
    "bits": draw_bits,
    "bytes": draw_bytes,
    "time": draw_time,
}
