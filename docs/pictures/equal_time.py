"""Compress in every step, or talk every 30? Validation loss over seconds behind slow links.

Data: benchmarks/results/large_model.json, runs of 1,000 steps, and predicted_steps.json, steps of a model of that size
on four hosts of one rank.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from style import save

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

CASES = {  # of the study of losses: whose steps they take, how many of the first ones are synchronous, a name
    "uncompressed": ("ddp", 0, "float32"),
    "loco": ("loco_ddp", 0, "loco_ddp"),
    "loco1": ("loco1_ddp", 0, "loco1_ddp"),
    "diloco, 0.8": ("diloco_ddp", 100, "diloco_ddp, every 30, 100 synchronous steps"),
}


def seconds(steps: np.ndarray, each: float, synchronous: int, step_s: float) -> np.ndarray:
    """After so many steps, of which the first are synchronized at 4 bits."""
    return step_s * np.minimum(steps, synchronous) + each * np.maximum(0, steps - synchronous)


def main() -> None:
    found = json.loads((RESULTS / "large_model.json").read_text())
    cells = json.loads((RESULTS / "predicted_steps.json").read_text())["runs"]
    figure, panels = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained", sharey=True)
    for panel, rate, title in zip(panels, ("200mbit", "50mbit"), ("200 Mbit/s", "50 Mbit/s"), strict=True):
        measured = {name: cell["measured_s"] for name, cell in cells[f"ddp 4x1 {rate} 0ms"]["cells"].items()}
        for case, (variant, synchronous, label) in CASES.items():
            losses = np.array([run["validation"] for run in found["runs"] if run["case"] == case])
            steps = found["setting"]["record_every"] * np.arange(1, losses.shape[1] + 1)
            at = seconds(steps, measured[variant], synchronous, measured["loco_ddp"])
            (line,) = panel.plot(at, losses.mean(0), label=label)
            panel.fill_between(at, losses.min(0), losses.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
            panel.plot(at[-1:], losses.mean(0)[-1:], "o", color=line.get_color(), markersize=4)
            print(
                f"{title}, {label}: {measured[variant]:.3g} s a step, {at[-1]:.0f} s in all, {losses.mean(0)[-1]:.3f}"
            )
        panel.set(xscale="log", xlabel="seconds", title=title)
    panels[0].set_ylabel("validation loss, nats per byte")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False
    )
    save(figure, "equal_time")


if __name__ == "__main__":
    main()
