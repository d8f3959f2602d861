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
    'dense {"dtype":"bfloat16"}': "bfloat16",
    'loco1 {"return_bits":null,"return_codebook":null,"return_block_size":null,"return_beta":0.8}': (
        "loco1, one bit back"
    ),
    'topk {"selection":"group","density":0.0625,"values":"int2","residual":"int8"}': "top-k of 16, 2 bits",
    'topk {"selection":"group","density":0.25,"values":"int2","residual":"int8"}': "top-k of 4, 2 bits",
    'topk {"selection":"chunk","density":0.03,"values":"int2","residual":"int8"}': "top-k of chunks, 2 bits",
    'powersgd {"rank":1}': "powersgd, rank 1",
    'powersgd {"rank":2}': "powersgd, rank 2",
}


def label(variant: str) -> str:
    return NAMES.get(variant, variant)


def results() -> Results:
    path = RESULTS / "low_bits.json"
    return Results(path, Setting(**json.loads(path.read_text())["setting"]), Run)


def draw_frontier() -> None:
    """Gap of the validation loss over bits per element and hop, one panel per kind of model, names beside them."""
    found = results()
    models = [model for model in ("recurrent", "convolutional", "transformer") if found.of(model=model)]
    variants = [name for name in dict.fromkeys(run.variant for run in found.runs) if name != DENSE]
    mean_bits = {name: statistics.fmean(run.codec_bits for run in found.of(variant=name)) for name in variants}
    numbers = {name: place + 1 for place, name in enumerate(sorted(variants, key=mean_bits.__getitem__))}
    figure, panels = plt.subplots(1, len(models), figsize=(4.1 * len(models), 4.4), squeeze=False, sharey=True)
    for axes, model in zip(panels[0], models, strict=True):
        draw_model(axes, found, model, numbers)
    panels[0][0].set_ylabel("validation loss over uncompressed, %")
    panels[0][0].legend(fontsize=8, loc="lower left")
    names = [f"{number} {label(name)}" for name, number in numbers.items()]
    columns, rows = 6, -(-len(names) // 6)
    figure.tight_layout(rect=(0, 0.05 * rows + 0.02, 1, 1))
    for place, name in enumerate(names):
        figure.text(0.02 + place // rows / columns, 0.05 * (rows - place % rows) - 0.02, name, fontsize=8)
    save(figure, "loss_over_bits")


def draw_model(axes: Any, found: Results, model: str, numbers: dict[str, int]) -> None:
    points: list[tuple[float, float]] = []
    for variant, layout in dict.fromkeys((run.variant, run.layout) for run in found.of(model=model)):
        gaps = found.gaps(variant, layout, model)
        if variant == DENSE or not gaps:
            continue
        bits = found.of(variant=variant, layout=layout, model=model)[0].codec_bits
        mean = statistics.fmean(gaps)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        color, marker = (BLUE, "o") if layout == "ddp" else (ORANGE, "s")
        axes.errorbar(bits, mean, error, fmt=marker, color=color, capsize=2, markersize=4)
        if layout == "ddp":
            points.append((bits, mean))
            axes.annotate(str(numbers[variant]), (bits, mean), (4, 3), textcoords="offset points", fontsize=8)
    frontier: list[tuple[float, float]] = []
    for bits, mean in sorted(points):
        if not frontier or mean < frontier[-1][1]:
            frontier.append((bits, mean))
    axes.plot(*zip(*frontier, strict=True), color=GREEN, linewidth=1.2, label="frontier, DDP", zorder=0)
    axes.plot([], [], "o", color=BLUE, markersize=4, label="DDP, two hops")
    axes.plot([], [], "s", color=ORANGE, markersize=4, label="FSDP2, one hop")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1, linscale=1.5)
    axes.set_xticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.set_yticks([-2, -1, -0.5, 0, 0.5, 1, 2, 5, 10], ["-2", "-1", "-0.5", "0", "0.5", "1", "2", "5", "10"])
    axes.set(xlabel="bits per element and hop", title=model)


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
