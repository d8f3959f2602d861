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
from style import BLUE, GRAY, GREEN, ORANGE, RED, save

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


# Labeled in the picture, with the place of the label from the point, in points; all others are dots.
LABELED = {
    "dgc": ("dgc", (6, 6)),
    "powersgd, rank 2": ("powersgd", (12, 22)),
    "loco1": ("loco1", (-52, 16)),
    "loco2": ("loco2", (2, 26)),
    "loco": ("loco", (12, 26)),
    "bfloat16": ("bfloat16", (-40, -24)),
}


def draw_frontier() -> None:
    """Gap of the validation loss over bits per element and hop, one panel per kind of model."""
    found = results()
    models = [model for model in ("recurrent", "convolutional", "transformer") if found.of(model=model)]
    for name, shape, size in (
        ("loss_over_bits", (1, len(models)), (11, 4.0)),
        ("loss_over_bits_narrow", (len(models), 1), (4.6, 9)),
    ):
        figure, panels = plt.subplots(
            *shape, figsize=size, squeeze=False, sharey=True, sharex=True, layout="constrained"
        )
        for axes, model in zip(panels.flat, models, strict=True):
            draw_model(axes, found, model)
        for axes in panels[:, 0]:
            axes.set_ylabel("validation loss over uncompressed, %")
        for axes in panels[-1]:
            axes.set_xlabel("bits per element and hop")
        panels[0][-1].legend(fontsize=9, loc="upper right", frameon=False)
        save(figure, name)


def draw_model(axes: Any, found: Results, model: str) -> None:
    for variant, layout in dict.fromkeys((run.variant, run.layout) for run in found.of(model=model)):
        gaps = found.gaps(variant, layout, model)
        if variant == DENSE or not gaps:
            continue
        bits = found.of(variant=variant, layout=layout, model=model)[0].codec_bits
        mean = statistics.fmean(gaps)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
        named = label(variant) in LABELED
        color = (BLUE if layout == "ddp" else ORANGE) if named else GRAY
        axes.errorbar(bits, mean, error, fmt="o" if layout == "ddp" else "s", color=color, capsize=2,
                      markersize=6 if named else 3, alpha=1.0 if named else 0.6, zorder=3 if named else 2)  # fmt: skip
        if named and layout == "ddp":
            text, place = LABELED[label(variant)]
            line = {"arrowstyle": "-", "color": color, "lw": 0.8}
            axes.annotate(text, (bits, mean), place, textcoords="offset points", fontsize=10, weight="bold",
                          color=color, arrowprops=line)  # fmt: skip
    axes.plot([], [], "o", color=BLUE, markersize=6, label="DDP, two hops")
    axes.plot([], [], "s", color=ORANGE, markersize=6, label="FSDP2, one hop")
    axes.plot([], [], "o", color=GRAY, markersize=3, alpha=0.6, label="other methods")
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.125, 0.5, 1, 2, 4, 8, 16], ["1/8", "1/2", "1", "2", "4", "8", "16"])
    axes.set(title=model, xlim=(0.09, 26), ylim=(-2.5, 14))


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
        axes.axhline(1, color=GRAY, linewidth=0.8)
        axes.axvline(saved["reset_steps"], color=GRAY, linewidth=0.8, linestyle=":")
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
    axes.axhline(0, color=GRAY, linewidth=0.8)
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
