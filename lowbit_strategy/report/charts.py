"""The report's charts, one function each, drawn with matplotlib."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lowbit_strategy.options.sizes import size
from lowbit_strategy.report.run import DENSE_GRADIENTS, DENSE_WEIGHTS, GRADIENTS, MANY, WEIGHTS, Run, Series

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
    "text.parse_math": False,  # names of parameters may have a dollar sign
}


_WIDTH, _WIDE = 6.0, 11.6  # inches of a chart, and of the first one, which has the page's whole width


def draw_all(run: Run) -> dict[str, Figure]:
    """All charts that the run has data for, by file stem, in reading order."""
    figures = {}
    with matplotlib.rc_context(_STYLE):
        for stem, draw in _CHARTS.items():
            figure = draw(run)
            if figure is not None:
                figures[stem] = figure
    return figures


def _new(width: float = _WIDTH, height: float = 3.6, ratios: Sequence[float] = (1.0,)) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    figure.align_ylabels(list(axes))
    return figure, list(axes)


def _finish(axes: Axes, run: Run, ylabel: str, xlabel: str = "") -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xlim(0, max(run.last_step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0)


def draw_loss(run: Run) -> Figure | None:
    """Loss curves over the share of the model at each level.

    Losses that span more than a factor of ten have a logarithmic axis.
    """
    curves = run.losses()
    if not curves and not run.levels:
        return None
    figure, (top, *below) = _new(_WIDE, 4.6, [3.4, 1.0]) if run.levels else _new(_WIDE)
    for axes in below:
        _draw_levels(axes, run)
    for color, (name, series) in zip(_COLORS, curves.items(), strict=False):
        _draw_curve(top, color, name, series)
    for step in sorted({line["step"] for line in run.switches} - {0}):
        top.axvline(step, color=_FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    for line in run.warnings:
        top.axvline(line["step"], color="#D55E00", linewidth=1.2, zorder=0)
    if curves:
        top.legend(loc="upper right")
    values = [value for series in curves.values() for value in series.values]
    if values and 0 < 10 * min(values) < max(values):
        top.set_yscale("log")
    _finish(top, run, "loss")
    figure.axes[-1].set_xlabel("optimizer step")
    return figure


def _draw_curve(axes: Axes, color: str, name: str, series: Series) -> None:
    """A curve; one of many points faint, and its moving mean over it."""
    many = len(series.steps) > MANY
    axes.plot(series.steps, series.values, color=color, alpha=0.25 if many else 1.0, label=None if many else name)
    if many:
        smooth = series.smooth()
        axes.plot(smooth.steps, smooth.values, color=color, label=name)
    if "val" in name:
        axes.plot(series.steps, series.values, "o", color=color, markersize=4)


def _draw_levels(axes: Axes, run: Run) -> None:
    labels = run.levels[-1]["labels"]
    written = [textwrap.fill(label, 110) for label in labels]
    shades = [matplotlib.colormaps["viridis"](0.15 + 0.75 * at / max(len(labels) - 1, 1)) for at in range(len(labels))]
    ends = [*(line["step"] for line in run.levels[1:]), max(run.last_step, run.levels[-1]["step"] + 1)]
    for line, end in zip(run.levels, ends, strict=True):
        bottom = 0.0
        for label, shade in zip(labels, shades, strict=True):
            share = line["shares"].get(label, 0.0)
            axes.fill_between([line["step"], end], bottom, bottom + share, color=shade, linewidth=0)
            bottom += share
    for label, shade in zip(written, shades, strict=True):
        axes.fill_between([], [], color=shade, label=label)
    patches = axes.get_legend_handles_labels()
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(*patches, loc="outside lower center", ncols=min(len(labels), 3))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_yticks([0, 0.5, 1])
    axes.grid(False)
    _finish(axes, run, "of elements")


def _draw_groups(run: Run, key: str, ylabel: str) -> Figure | None:
    if not run.observations:
        return None
    figure, (axes,) = _new(height=4.2)
    for color, name in zip(_COLORS, run.groups[:_MAX_GROUPS], strict=False):
        series = run.group(name, key)
        axes.plot(series.steps, series.values, color=color, linewidth=1.3, label=_short(name))
    total = run.total(key)
    axes.plot(total.steps, total.values, color=_INK, linewidth=2.6, label="all parameters")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9, columnspacing=1.4, handlelength=1.4)
    axes.set_ylim(bottom=0.0)
    _finish(axes, run, ylabel, xlabel="optimizer step")
    return figure


def _short(name: str, length: int = 30) -> str:
    return name if len(name) <= length else "..." + name[-(length - 3) :]


def draw_bytes(run: Run) -> Figure | None:
    """Bytes sent so far, of gradients and of weights, with what would have been sent without compression."""
    gradients, sent = run.bytes_so_far(GRADIENTS), run.bytes_so_far(GRADIENTS, WEIGHTS)
    dense = run.bytes_so_far(DENSE_GRADIENTS, DENSE_WEIGHTS)
    if not sent or not dense.values[-1]:
        return None
    figure, (axes,) = _new()
    axes.plot(dense.steps, dense.values, color=_FAINT, label="uncompressed")
    axes.fill_between(gradients.steps, 0, gradients.values, color=_COLORS[0], alpha=0.8, linewidth=0, label="gradients")
    if run.counts_weights:
        axes.fill_between(
            sent.steps, gradients.values, sent.values, color=_COLORS[5], alpha=0.8, linewidth=0, label="weights"
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    figure.legend(loc="outside lower center", ncols=3)
    axes.set_ylim(bottom=0)
    _finish(axes, run, "sent by one rank so far", xlabel="optimizer step")
    return figure


def draw_time(run: Run) -> Figure | None:
    """Where the step's time goes: methods, waiting for bytes, everything else."""
    lines = run.timed
    if len(lines) < 2:
        return None
    figure, (axes,) = _new()
    other = [max(line["step_ms"] - line["codec_ms"] - line["comm_ms"], 0.0) for line in lines]
    axes.stackplot(
        [line["step"] for line in lines],
        other,
        [line["comm_ms"] for line in lines],
        [line["codec_ms"] for line in lines],
        colors=("#d5dbe1", _COLORS[5], _COLORS[1]),
        labels=("everything else", "waiting for bytes", "compression"),
        linewidth=0,
    )
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=3)
    times = sorted(line["step_ms"] for line in lines)
    top = 1.25 * times[(len(times) - 1) * 9 // 10]  # a few slow steps do not set the axis
    axes.set_ylim(0, min(top, 1.05 * times[-1]))
    if slow := sum(time > top for time in times):
        text = f"{slow} slower step{'s' if slow > 1 else ''}, up to {times[-1]:,.0f} ms"
        axes.annotate(text, (1, 1), xycoords="axes fraction", ha="right", va="bottom", color="#52606d", fontsize=9)
    _finish(axes, run, "ms per step", xlabel="optimizer step")
    return figure


_CHARTS: dict[str, Callable[[Run], Figure | None]] = {
    "loss": draw_loss,
    "error": partial(_draw_groups, key="relative_error", ylabel="relative error"),
    "bits": partial(_draw_groups, key="bits_per_element", ylabel="bits per element"),
    "bytes": draw_bytes,
    "time": draw_time,
}
