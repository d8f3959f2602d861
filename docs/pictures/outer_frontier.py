"""Local steps: the loss over the length of rounds and over the bits sent, and over the learning rate.

Data: benchmarks/results/outer_frontier.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from style import BLUE, GRAY, GREEN, ORANGE, RED, save

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "outer_frontier.json"
COLORS = {32: GRAY, 4: BLUE, 2: ORANGE, 1: RED}


def runs() -> list[dict[str, Any]]:
    """With the number of bits and the length of rounds of each."""
    found: list[dict[str, Any]] = json.loads(PATH.read_text())["runs"]
    for run in found:
        words = run["variant"].split()
        run["width"], run["every"] = (int(words[0]), int(words[3])) if len(words) > 1 else (None, None)
    return found


def draw() -> None:
    found = runs()
    usual = next(run["rate"] for run in found if run["variant"] == "1 bits every 1")
    dense = {run["rate"]: run["validation_loss"] for run in found if run["variant"] == "dense"}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.5))
    for width, color in COLORS.items():
        chosen = sorted(
            (run for run in found if (run["width"], run["rate"]) == (width, usual)), key=lambda r: r["every"]
        )
        gaps = [100 * (run["validation_loss"] / dense[usual] - 1) for run in chosen]
        name = f"{width} bits" if width > 1 else "1 bit"
        left.plot([run["every"] for run in chosen], gaps, "o-", color=color, markersize=4, label=name)
        middle.plot([run["bits"] for run in chosen], gaps, "o-", color=color, markersize=4)
        for run, gap in zip(chosen, gaps, strict=True):
            if width == 4:
                middle.annotate(
                    str(run["every"]), (run["bits"], gap), xytext=(3, 4), textcoords="offset points", fontsize=8
                )
    left.set_xscale("log")
    left.set_xticks([1, 3, 10, 30, 100], ["1", "3", "10", "30", "100"])
    left.set(xlabel="optimizer steps per round", ylabel="validation loss over synchronous, %")
    left.legend(fontsize=8)
    middle.set_xscale("log")
    middle.set(xlabel="bits per parameter and optimizer step", title="the number is the length of a round")
    for every, color in ((None, GRAY), (10, GREEN), (30, BLUE)):
        chosen = sorted(
            (run for run in found if run["every"] == every and run["width"] in (4, None)), key=lambda r: r["rate"]
        )
        name = "synchronous" if every is None else f"4 bits, every {every}"
        rates, losses = [run["rate"] for run in chosen], [run["validation_loss"] for run in chosen]
        right.plot(rates, losses, "o-", color=color, markersize=4, label=name)
    right.set_xscale("log")
    right.set_xticks(sorted(dense), [f"{rate:g}" for rate in sorted(dense)])
    right.minorticks_off()
    right.set(xlabel="learning rate", ylabel="validation loss")
    right.legend(fontsize=8)
    figure.tight_layout()
    save(figure, "outer_frontier")


if __name__ == "__main__":
    draw()
