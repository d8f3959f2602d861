"""The report's charts, one function each, drawn with matplotlib."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogFormatter, MaxNLocator

from lowbit_strategy.options.conversion import size
from lowbit_strategy.report.run import DENSE_GRADIENTS, DENSE_WEIGHTS, GRADIENTS, MANY, WEIGHTS, Run, Series

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C564B")
_INK, _FAINT = "#1f2933", "#9aa5b1"
_MAX_GROUPS = 8
STYLE: Any = {  # keys are a literal type of matplotlib's stubs
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


class Paper(NamedTuple):
    """What charts are drawn for: text keeps its size, so a narrow screen gets its own charts.

    Args:
        width: Of a chart, in inches.
        wide: Of the first chart, which has the page's whole width.
        columns: Of legends.
        log_loss: Logarithmic loss; None: where losses span more than a factor of ten.
    """

    width: float
    wide: float
    columns: int
    log_loss: bool | None = None


SCREEN = Paper(width=6.0, wide=11.6, columns=2)
PHONE = Paper(width=3.9, wide=3.9, columns=1)


def draw_all(run: Run, paper: Paper = SCREEN, baseline: Run | None = None) -> dict[str, Figure]:
    """All charts that the run has data for, by file stem, in reading order."""
    figures = {}
    with matplotlib.rc_context(STYLE):
        for stem, draw in _CHARTS.items():
            figure = draw_loss(run, paper, baseline) if stem == "loss" else draw(run, paper)
            if figure is not None:
                figures[stem] = figure
    return figures


def png(figure: Figure, dots_per_inch: int) -> bytes:
    """A chart as a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch)
    return buffer.getvalue()


def plain_decades(axis: Axis) -> None:
    """Numbers as people write them on a logarithmic axis; between powers of ten where there are few of those."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))


def _new(width: float, height: float = 3.6, ratios: Sequence[float] = (1.0,)) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    figure.align_ylabels(list(axes))
    return figure, list(axes)


def _finish(axes: Axes, run: Run, ylabel: str, last_step: int | None = None, xlabel: str = "") -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_xlim(0, max(run.last_step if last_step is None else last_step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0)


def draw_loss(run: Run, paper: Paper = SCREEN, baseline: Run | None = None) -> Figure | None:
    """Loss curves, those of the baseline in gray, over the learning rate and the share of the model at each level."""
    curves = run.losses()
    bands = [draw for draw, data in ((_draw_rates, run.learning_rates()), (_draw_levels, run.levels)) if data]
    if not curves and not run.levels:
        return None
    height = 3.6 + len(bands) + (1.8 if paper.columns == 1 else 0.0)  # a narrow chart has its legends above and below
    figure, (top, *below) = _new(paper.wide, height, [3.4] + len(bands) * [1.0])
    for draw, axes in zip(bands, below, strict=True):
        draw(axes, run, paper)
    if baseline is not None:
        for style, (name, series) in zip(("-", "--", ":"), baseline.losses().items(), strict=False):
            smooth = series.smooth()
            top.plot(smooth.steps, smooth.values, style, color=_FAINT, label=f"baseline: {name}")
    for color, (name, series) in zip(COLORS, curves.items(), strict=False):
        _draw_curve(top, color, name, series)
    for step in sorted({line["step"] for line in run.switches} - {0}):
        top.axvline(step, color=_FAINT, linewidth=0.8, linestyle=(0, (3, 3)), zorder=0)
    for line in run.warnings:
        top.axvline(line["step"], color="#D55E00", linewidth=1.2, zorder=0)
    if curves:
        handles, names = top.get_legend_handles_labels()
        if paper.columns > 1:
            top.legend(loc="upper right")
        else:  # there is no room beside the curves
            figure.legend(handles, names, loc="outside upper left", fontsize=9)
    shown = [*curves.values(), *(baseline.losses().values() if baseline is not None else ())]
    values = [value for series in shown for value in series.values]
    logarithmic = bool(values) and min(values) > 0 and max(values) > 10 * min(values)
    if values and min(values) > 0 and (paper.log_loss or (logarithmic and paper.log_loss is None)):
        top.set_yscale("log")
    _finish(top, run, "loss", max(run.last_step, baseline.last_step if baseline is not None else 0))
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


def _draw_rates(axes: Axes, run: Run, _: Paper) -> None:
    for series in run.learning_rates().values():
        axes.plot(series.steps, series.values, color=COLORS[2])
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="plain")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=2))
    _finish(axes, run, "learning rate")


def _draw_levels(axes: Axes, run: Run, paper: Paper) -> None:
    labels = run.levels[-1]["labels"]
    written = [textwrap.fill(label, 42 if paper.columns == 1 else 110) for label in labels]
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
    figure.legend(*patches, loc="outside lower center", ncols=min(len(labels), 2 * paper.columns - 1))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.set_yticks([0, 0.5, 1])
    axes.grid(False)
    _finish(axes, run, "of elements")


def _draw_groups(run: Run, paper: Paper, key: str, ylabel: str) -> Figure | None:
    if not run.observations:
        return None
    figure, (axes,) = _new(paper.width, 4.2 if paper.columns > 1 else 5.0)
    for color, name in zip(COLORS, run.groups[:_MAX_GROUPS], strict=False):
        series = run.group(name, key)
        axes.plot(series.steps, series.values, color=color, linewidth=1.3, label=_short(name))
    total = run.total(key)
    axes.plot(total.steps, total.values, color=_INK, linewidth=2.6, label="all parameters")
    figure.legend(loc="outside lower center", ncols=paper.columns, fontsize=9, columnspacing=1.4, handlelength=1.4)
    axes.set_ylim(bottom=0.0)
    _finish(axes, run, ylabel, xlabel="optimizer step")
    return figure


def _short(name: str, length: int = 30) -> str:
    return name if len(name) <= length else "..." + name[-(length - 3) :]


def draw_bytes(run: Run, paper: Paper = SCREEN) -> Figure | None:
    """Bytes sent so far, of gradients and of weights, beside what would have been sent without compression."""
    gradients, sent = run.bytes_so_far(GRADIENTS), run.bytes_so_far(GRADIENTS, WEIGHTS)
    dense = run.bytes_so_far(DENSE_GRADIENTS, DENSE_WEIGHTS)
    if not sent or not dense.values[-1]:
        return None
    figure, (axes,) = _new(paper.width)
    axes.plot(dense.steps, dense.values, color=_FAINT, label="uncompressed")
    axes.fill_between(gradients.steps, 0, gradients.values, color=COLORS[0], alpha=0.8, linewidth=0, label="gradients")
    if run.counts_weights:
        axes.fill_between(
            sent.steps, gradients.values, sent.values, color=COLORS[5], alpha=0.8, linewidth=0, label="weights"
        )
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    figure.legend(loc="outside lower center", ncols=2 * paper.columns - 1)
    axes.set_ylim(bottom=0)
    _finish(axes, run, "sent by one rank so far", xlabel="optimizer step")
    return figure


def draw_time(run: Run, paper: Paper = SCREEN) -> Figure | None:
    """Where the step's time goes: methods, waiting for bytes, everything else."""
    lines = run.timed
    if len(lines) < 2:
        return None
    figure, (axes,) = _new(paper.width)
    other = [max(line["step_ms"] - line["codec_ms"] - line["comm_ms"], 0.0) for line in lines]
    axes.stackplot(
        [line["step"] for line in lines],
        other,
        [line["comm_ms"] for line in lines],
        [line["codec_ms"] for line in lines],
        colors=("#d5dbe1", COLORS[5], COLORS[1]),
        labels=("everything else", "waiting for bytes", "compression"),
        linewidth=0,
    )
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside lower center", ncols=2 * paper.columns - 1)
    times = sorted(line["step_ms"] for line in lines)
    top = 1.25 * times[(len(times) - 1) * 9 // 10]  # a few slow steps do not set the axis
    axes.set_ylim(0, min(top, 1.05 * times[-1]))
    if slow := sum(time > top for time in times):
        text = f"{slow} slower step{'s' if slow > 1 else ''}, up to {times[-1]:,.0f} ms"
        axes.annotate(text, (1, 1), xycoords="axes fraction", ha="right", va="bottom", color="#52606d", fontsize=9)
    _finish(axes, run, "ms per step", xlabel="optimizer step")
    return figure


_CHARTS: dict[str, Callable[[Run, Paper], Figure | None]] = {
    "loss": draw_loss,
    "error": partial(_draw_groups, key="relative_error", ylabel="relative error"),
    "bits": partial(_draw_groups, key="bits_per_element", ylabel="bits per element"),
    "bytes": draw_bytes,
    "time": draw_time,
}
