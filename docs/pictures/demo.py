"""The picture of the first page: the demo's two runs, and time per step behind slow links.

Reads ``runs/demo.json`` (``make demo ARGS="--steps 300"``: Lightning's ``ddp`` and ``loco_ddp``, means of five losses)
and the results of ``benchmarks/network.py`` in ``benchmarks/results``.
"""

from __future__ import annotations

import json
from typing import Any

from style import BLUE, GRAY, HERE, ORANGE, plt, save

LABELS = {"ddp": ("uncompressed", GRAY), "loco_ddp": ("LoCo, 4 bits", BLUE)}


def main() -> None:
    runs = json.loads((HERE / "runs" / "demo.json").read_text())
    network = json.loads((HERE.parents[1] / "benchmarks" / "results" / "network_ddp_step.json").read_text())
    for name, shape, options in (
        ("demo", (1, 3), {"figsize": (11, 3.4), "width_ratios": (5, 2, 4)}),
        ("demo_narrow", (3, 1), {"figsize": (4.6, 9.5)}),
    ):
        figure, (losses, nbytes, seconds) = plt.subplots(*shape, layout="constrained", **options)
        draw_losses(losses, runs)
        draw_bytes(nbytes, runs)
        draw_seconds(seconds, network["rows"])
        save(figure, name)


def draw_losses(axes: Any, runs: dict[str, Any]) -> None:
    for strategy, (label, color) in LABELS.items():
        steps, values = zip(*runs[strategy]["train_smoothed"], strict=True)
        axes.plot(steps, values, color=color, lw=4 if color == GRAY else 1.3, alpha=0.5 if color == GRAY else 1)
        steps, values = zip(*runs[strategy]["validation"], strict=True)
        axes.plot(steps, values, "o", color=color, ms=9 if color == GRAY else 4, alpha=0.5 if color == GRAY else 1)
        axes.annotate(f"{label}: {values[-1]:.3f}", (0.97, 0.92 if color == GRAY else 0.83), color=color,
                      xycoords="axes fraction", ha="right", weight="bold")  # fmt: skip
    axes.set(xlabel="optimizer step", ylabel="loss (nats per byte)", title="The loss is the same")
    axes.set_ylim(2, 4.5)


def draw_bytes(axes: Any, runs: dict[str, Any]) -> None:
    for strategy, (label, color) in LABELS.items():
        megabytes = runs[strategy]["sent_nbytes_per_step"] / 1e6
        axes.bar(label.replace(", ", ",\n"), megabytes, color=color, width=0.6)
        axes.text(label.replace(", ", ",\n"), megabytes, f"{megabytes:.2f}", ha="center", va="bottom")
    axes.set(ylabel="MB per step and rank", title="Gradient bytes")
    axes.grid(axis="x", visible=False)


def draw_seconds(axes: Any, rows: list[dict[str, Any]]) -> None:
    for at, rate in enumerate(("200mbit", "1gbit")):
        times = {row["variant"]: row["seconds"] for row in rows if row["rate"] == rate}
        for shift, variant, color in ((-0.2, "ddp", ORANGE), (0.2, "loco_ddp", BLUE)):
            axes.bar(at + shift, times[variant], 0.38, color=color, label={"ddp": "PyTorch DDP"}.get(variant, variant))
            axes.bar(at + shift, times["no-sync"], 0.38, color="white", alpha=0.55)
            axes.text(at + shift, times[variant], f"{times[variant]:.2f}", ha="center", va="bottom")
    axes.set_xticks((0, 1), ("200 Mbit/s", "1 Gbit/s"))
    axes.set(ylabel="seconds per step", title="Four hosts, slow links")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[:2], labels[:2], frameon=False, title="pale: computing")
    axes.grid(axis="x", visible=False)


if __name__ == "__main__":
    main()
