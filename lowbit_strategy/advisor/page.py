"""The page of ``lowbit advise --html``: the table, and steps over bandwidth and latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from lowbit_strategy.advisor.advice import SetupOption
from lowbit_strategy.advisor.cluster import Link
from lowbit_strategy.advisor.cost import step_time
from lowbit_strategy.advisor.inputs import Situation
from lowbit_strategy.advisor.units import rounded
from lowbit_strategy.advisor.workload import Workload
from lowbit_strategy.report.charts import COLORS, PHONE, SCREEN, STYLE, Paper, plain_decades, png
from lowbit_strategy.report.page import as_text, render

_POINTS = 30
_DECADES = 1.5  # to both sides of the figure that was given

_METHODS = ("loco", "loco2", "loco1", "powersgd", "diloco")  # in the order of their colors
_OWN = ("#9aa5b1", "#1f2933")  # of float32 and of bf16
_LAYOUTS = {"ddp": "DDP", "fsdp": "FSDP2", "hsdp": "HSDP"}


def write_advice(
    out: Path, found: Sequence[SetupOption], workload: Workload, situation: Situation, words: tuple[str, str, str]
) -> Path:
    """Write one file that needs nothing else; returns its path.

    Args:
        out: The file.
        found: All set-ups.
        workload: Model and ranks.
        situation: Links and computing.
        words: Title, which figures are given and which assumed, the answer.

    Raises:
        ValueError: The file cannot be written.
    """
    charts = []
    for layout, name in _LAYOUTS.items():
        own = [each for each in found if each.plan.layout == layout]
        if not own:
            continue
        images = {}
        for paper, size in ((SCREEN, "png"), (PHONE, "phone")):
            images[size] = [as_text(png(figure, 150)) for figure in curves(own, situation, paper)]
        for at, over in enumerate(("bandwidth", "latency")):
            charts.append({"title": f"{name}, over {over}", "png": images["png"][at], "phone": images["phone"][at]})
    title, sources, answer = words
    rows = [_row(each, workload) for each in found]
    page = render("advice.html.j2", title=title, sources=sources, answer=answer, rows=rows, charts=charts)
    try:
        out.write_text(page, "utf-8")
    except OSError as error:
        raise ValueError(f"--html {out}: it cannot be written ({error.strerror})") from None
    return out


def curves(found: Sequence[SetupOption], situation: Situation, paper: Paper = SCREEN) -> tuple[Figure, Figure]:
    """Seconds of a step of each set-up, over the bandwidth and over the latency between nodes."""
    cluster, compute_s = situation.cluster, situation.compute_s
    far = cluster.inter_node

    def seconds(choice: SetupOption, link: Link) -> float:
        return step_time(choice.plan, cluster.between_nodes(link), compute_s).seconds

    draw = partial(_figure, found, seconds, paper)
    return (
        draw("Gbit/s between nodes", 8e-9, far.nbytes_per_s, lambda rate: Link(far.latency_s, rate)),
        draw("ms between nodes, one way", 1e3, far.latency_s, lambda s: Link(s, far.nbytes_per_s)),
    )


def _around(value: float) -> list[float]:
    return [value * 10 ** (_DECADES * (2 * at / (_POINTS - 1) - 1)) for at in range(_POINTS)]


def _figure(
    found: Sequence[SetupOption],
    seconds: Callable[[SetupOption, Link], float],
    paper: Paper,
    label: str,
    scale: float,
    given: float,
    link_of: Callable[[float], Link],
) -> Figure:
    values = _around(max(given, 1e-5))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(paper.width, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for each in found:
            times = [seconds(each, link_of(value)) for value in values]
            style, color = ("-", _color(each)) if each.line else ("--", _OWN[each.name.endswith("bf16")])
            style = ":" if each.name.endswith("*") else style
            axes.plot([scale * value for value in values], times, style, color=color, label=each.name)
        axes.axvline(scale * given, color="#9aa5b1", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds of a step")
        plain_decades(axes.xaxis)
        plain_decades(axes.yaxis)
        figure.legend(loc="outside lower center", ncols=2 * paper.columns, fontsize=8)
    return figure


def _color(choice: SetupOption) -> str:
    """The same for a method on every chart."""
    method = choice.name.removesuffix("*").rpartition("_")[0]
    return COLORS[_METHODS.index(method) if method in _METHODS else -1]


def _row(choice: SetupOption, workload: Workload) -> dict[str, str]:
    time = choice.time
    return {
        "name": choice.name,
        "line": choice.line if choice.line.endswith(")") else "",
        "step": "" if time is None else rounded(time.seconds),
        "range": "" if time is None else f"{rounded(time.low)} to {rounded(time.high)}",
        "sent": f"{choice.between_nbytes / 1e9:.2f}",
        "memory": f"{choice.held_nbytes(workload) / 1e9:.1f}",
        "loss": "" if not choice.line else "unknown" if choice.loss is None else str(choice.loss),
        "steps": "" if not choice.line else "unknown" if choice.steps is None else str(choice.steps),
    }
