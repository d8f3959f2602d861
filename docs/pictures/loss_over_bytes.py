"""Loss over bits of every compressor with its defaults, at its best learning rate.

Data: benchmarks/results/loss_over_bytes.json.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from style import BLUE, GRAY, GREEN, ORANGE, RED, save

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.loss_over_bytes import Point, all_defaults, is_beaten, points, read  # noqa: E402
from benchmarks.simulated import parse  # noqa: E402
from lowbit_strategy import ACPSGD, ATOMO, GradiVeQ, PowerSGD  # noqa: E402

LOW_RANK = (ACPSGD, ATOMO, GradiVeQ, PowerSGD)
KINDS = {"sparse": GREEN, "low-rank": RED, "below 3 bits": ORANGE, "quantizers": BLUE, "uncompressed": GRAY}


def kind(point: Point) -> str:
    compressor = parse(point.variant)
    if point.name == "dense":
        return "uncompressed"
    if compressor.is_sparse:
        return "sparse"
    if isinstance(compressor, LOW_RANK):
        return "low-rank"
    return "below 3 bits" if point.bits < 3 else "quantizers"


def draw(name: str, size: tuple[float, float], fontsize: float) -> None:
    found = points(read(ROOT / "benchmarks" / "results" / "loss_over_bytes.json"), all_defaults())
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    for each in found:
        color, beaten = KINDS[kind(each)], is_beaten(each, found)
        axes.errorbar(each.bits, each.mean, each.error, color=color, elinewidth=0.8)
        axes.plot(each.bits, each.mean, "o", color=color, markersize=5, markerfacecolor="white" if beaten else color)
    for label, color in KINDS.items():
        axes.plot([], [], "o", color=color, markersize=5, label=label)
    axes.plot([], [], "o", color=GRAY, markersize=5, markerfacecolor="white", label="another is better in both")
    axes.set_xscale("log")
    axes.set_xticks([0.3, 1, 2, 4, 8, 16, 32], ["0.3", "1", "2", "4", "8", "16", "32"])
    axes.minorticks_off()
    axes.set(xlabel="bits per compressed element and hop", ylabel="validation loss")
    axes.legend(fontsize=fontsize, frameon=False, loc="upper left")
    put_labels(figure, axes, found, fontsize)
    save(figure, name)


def put_labels(figure: Any, axes: Any, found: list[Point], fontsize: float) -> None:
    """Each beside its point, at the first place that is free; farther away with a line."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    places = [axes.transData.transform((each.bits, each.mean)) for each in found]
    legend = axes.get_legend().get_window_extent(renderer)
    taken = [(x - 4, y - 4, x + 4, y + 4) for x, y in places] + [(legend.x0, legend.y0, legend.x1, legend.y1)]
    inside = axes.get_window_extent(renderer)
    for each, (x, y) in sorted(zip(found, places, strict=True), key=lambda pair: -pair[1][1]):
        text = axes.annotate(each.name, (each.bits, each.mean), (0, 0), textcoords="offset points", fontsize=fontsize)
        box = text.get_window_extent(renderer)
        wide, high = box.width, box.height
        text.remove()
        for distance, angle in ((d, a) for d in range(7, 140, 6) for a in range(0, 360, 20)):
            dx, dy = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            left = x + dx - (wide if dx < -1e-6 else 0)
            corner = (left, y + dy - high / 2, left + wide, y + dy + high / 2)
            free = all(corner[2] < a or corner[0] > c or corner[3] < b or corner[1] > d for a, b, c, d in taken)
            if free and inside.x0 < corner[0] and corner[2] < inside.x1 and inside.y0 < corner[1] < inside.y1 - high:
                break
        taken.append(corner)
        scale = 72 / figure.dpi
        axes.annotate(
            each.name,
            (each.bits, each.mean),
            ((corner[0] - x) * scale, (y + dy - y) * scale),
            textcoords="offset points",
            va="center",
            fontsize=fontsize,
            arrowprops={"arrowstyle": "-", "color": GRAY, "lw": 0.5} if distance > 12 else None,
        )


if __name__ == "__main__":
    draw("loss_over_bytes", (9, 5.5), 8)
    draw("loss_over_bytes_narrow", (4.6, 6), 6.5)
