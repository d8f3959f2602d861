"""A larger model: validation loss over steps, and the gap to uncompressed training of the same seed.

Data: benchmarks/results/large_model.json and large_model_5000.json, each in a picture of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from style import save

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

COLORS = 7  # before lines are dashed


def draw(study: str) -> None:
    found = json.loads((RESULTS / f"{study}.json").read_text())
    curves = {
        case: np.array([run["validation"] for run in found["runs"] if run["case"] == case])
        for case in dict.fromkeys(run["case"] for run in found["runs"])
    }
    exact = curves["uncompressed"]
    steps = found["setting"]["record_every"] * np.arange(1, exact.shape[1] + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    whole = {case: losses for case, losses in curves.items() if len(losses) == len(exact)}  # whose seeds are all there
    for number, (case, losses) in enumerate(whole.items()):
        dashes = "-" if number < COLORS else "--"
        (line,) = left.plot(steps, losses.mean(0), dashes, color=f"C{number % COLORS}", label=case)
        gaps = 100 * (losses / exact - 1)
        right.plot(steps, gaps.mean(0), dashes, color=line.get_color())
        right.fill_between(steps, gaps.min(0), gaps.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
    left.set(xlabel="step", ylabel="validation loss, nats per byte")
    right.set(xlabel="step", ylabel="gap to uncompressed, %", title="mean and range of seeds")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    save(figure, study)


if __name__ == "__main__":
    for study in ("large_model", "large_model_5000"):
        draw(study)
