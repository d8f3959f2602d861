"""Few bits: loss over bits with its frontier, LoCo's share of a constant gradient, gap over learning rate.

Data: benchmarks/results/low_bits.json, constant_gradient.json and low_bits_tuning.json.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from style import BLUE, GREEN, GREY, ORANGE, RED, save

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.low_bits import DENSE, Results, Run, Setting  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
NAMES = {
    'topk {"selection":"group","density":0.0625,"values":"int2","residual":"int8"}': "one of 16, 2 bits",
    'topk {"selection":"group","density":0.0625,"values":"int2","residual":"int8","decay":0.95}': "the same, fading",
    'topk {"selection":"chunk","density":0.035,"values":"int2","residual":"int8"}': "top-k of chunks, 2 bits",
    'topk {"selection":"chunk","density":0.035,"values":"int2","residual":"int8","decay":0.95}': "the same, fading",
}


def label(variant: str) -> str:
    return NAMES.get(variant, variant)


def results() -> Results:
    path = RESULTS / "low_bits.json"
    return Results(path, Setting(**json.loads(path.read_text())["setting"]), Run)


def draw_frontier() -> None:
    """Gap of the validation loss over bits per element and hop, both layouts, one panel per kind of model."""
    found = results()
    models = list(dict.fromkeys(run.model for run in found.runs))
    figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.6), squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        draw_model(axes, found, model)
    panels[0][0].set_ylabel("validation loss over uncompressed, %")
    panels[0][0].legend(fontsize=8, loc="lower left")
    figure.tight_layout()
    save(figure, "loss_over_bits")


def draw_model(axes: Any, found: Results, model: str) -> None:
    points: list[tuple[float, float]] = []
    for variant, layout in dict.fromkeys((run.variant, run.layout) for run in found.runs if run.variant != DENSE):
        gaps = [gap for gap, _ in found.gaps(variant, layout, model)]
        if not gaps:
            continue
        bits = next(run.codec_bits for run in found.runs if (run.variant, run.layout) == (variant, layout))
        mean = statistics.fmean(gaps)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        color, marker, shift = (BLUE, "o", 0.98) if layout == "ddp" else (ORANGE, "s", 1.02)
        axes.errorbar(bits * shift, mean, error, fmt=marker, color=color, capsize=2, markersize=5)
        if layout == "ddp":
            points.append((bits, mean))
            place = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": 8}
            axes.text(bits, 1.0, label(variant).replace("_", "\n"), **place)
    frontier: list[tuple[float, float]] = []
    for bits, mean in sorted(points):
        if not frontier or mean < frontier[-1][1]:
            frontier.append((bits, mean))
    if frontier:
        axes.plot(*zip(*frontier, strict=True), color=GREEN, linewidth=1.2, label="frontier, DDP", zorder=0)
    axes.plot([], [], "o", color=BLUE, label="DDP, two hops")
    axes.plot([], [], "s", color=ORANGE, label="FSDP2, one hop")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 1.5, 2, 3], ["1", "1.5", "2", "3"])
    axes.set(xlabel="bits per element and hop", title=model, xlim=(1, 3))
    axes.margins(y=0.2)


def draw_constant_gradient() -> None:
    """Share of a constant gradient, and that share over the size that Adam divides by."""
    saved: dict[str, Any] = json.loads((RESULTS / "constant_gradient.json").read_text())
    figure, both = plt.subplots(1, 2, figsize=(9, 3.4), sharex=True)
    for (name, curves), color in zip(saved["variants"].items(), (RED, ORANGE, BLUE, GREEN), strict=True):
        curve = curves["noise"]
        both[0].plot(curve["share"], color=color, linewidth=1.2, label=name)
        ratio = [share / size for share, size in zip(curve["share"], curve["size"], strict=True)]
        both[1].plot(ratio, color=color, linewidth=1.2)
    for axes, title in zip(both, ("share of a constant gradient", "share over size: what Adam steps by"), strict=True):
        axes.axhline(1, color=GREY, linewidth=0.8)
        axes.axvline(saved["reset_steps"], color=GREY, linewidth=0.8, linestyle=":")
        axes.set(xlabel="step (dotted: the residual is forgotten)", ylim=(0.3, 1.15), title=title)
    both[0].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    save(figure, "loco_gain")


def draw_rates() -> None:
    """Gap of 1-bit LoCo over the learning rate, with both kinds of codebook."""
    runs = json.loads((RESULTS / "low_bits_tuning.json").read_text())
    figure, axes = plt.subplots(figsize=(5.6, 3.4))
    for codebook, color in (("fitted", RED), ("unit_gain", BLUE)):
        chosen = [
            run
            for run in runs
            if run["steps"] == 400 and run["layout"] == "ddp" and run["variant"] == f'loco1 {{"codebook":"{codebook}"}}'
        ]
        gaps: dict[float, list[float]] = {}
        for run in chosen:
            gap = 100 * (run["validation_loss"] / run["dense_loss"] - 1)
            gaps.setdefault(run["learning_rate"], []).append(gap)
        rates = sorted(gaps)
        axes.plot(rates, [statistics.fmean(gaps[rate]) for rate in rates], "o-", color=color, label=codebook)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xscale("log")
    axes.set(xlabel="learning rate", ylabel="validation loss over uncompressed, %", title="1 bit, two hops, 400 steps")
    axes.legend(fontsize=8)
    figure.tight_layout()
    save(figure, "loco_rates")


if __name__ == "__main__":
    draw_constant_gradient()
    draw_rates()
    if (RESULTS / "low_bits.json").exists():
        draw_frontier()
