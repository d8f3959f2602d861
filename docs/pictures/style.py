"""What the pictures of the documentation share: fonts, colors, boxes and arrows, and where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, GREEN, GRAY, RED = "#2b6cb0", "#dd6b20", "#2f855a", "#718096", "#c53030"
PALE = {BLUE: "#ebf4fb", ORANGE: "#fdf0e3", GREEN: "#e6f4ec", GRAY: "#f1f3f5", RED: "#fdecec"}

plt.rcParams.update(
    {
        "font.size": 10,
        "font.family": "DejaVu Sans",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "figure.facecolor": "white",
        "svg.hashsalt": "lowbit_strategy",  # the same file from the same drawing
    }
)


def canvas(width: float, height: float, *, units: tuple[float, float] = (100, 100)) -> tuple[Any, Any]:
    """A figure without axes, to draw on in `units`."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, units[0]), ylim=(0, units[1]))
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def box(
    axes: Any,
    x: float,
    y: float,
    width: float,
    height: float,
    text: str,
    color: str = BLUE,
    *,
    face: str | None = None,
    **font: Any,
) -> None:
    """A labeled box whose lower left corner is (x, y)."""
    order = font.get("zorder", 2)
    shape = "round,pad=0,rounding_size=0.8" if height > 2 else "square,pad=0"  # corners are round in equal units only
    axes.add_patch(
        FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=face or PALE[color], ec=color, zorder=order)
    )
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", **(font | {"zorder": order + 1}))


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], text: str = "", **options: Any) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": GRAY, "lw": 1.2, "shrinkA": 0, "shrinkB": 0} | options
    axes.add_patch(FancyArrowPatch(start, end, **style))
    if text:
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        axes.text(*middle, text, ha="center", va="center", fontsize=9, bbox={"fc": "white", "ec": "none", "pad": 1})


def decisions(name: str, questions: Any, last: str, *, height: float, **font: Any) -> None:
    """A column of questions, answers beside them: `name`, and ``<name>_narrow`` for narrow screens.

    Args:
        name: Of the files.
        questions: Each with the answer that leaves the column, what follows from it, and its color.
        last: What is left at the column's end.
        height: Of the picture, in inches.
        font: Of `last`.
    """
    for suffix, width, (left, wide), (right, narrow) in (
        ("", 6.5, (6, 42), (66, 30)),
        ("_narrow", 4.6, (1, 51), (61, 38)),
    ):
        figure, axes = canvas(width, height, units=(100, 96))
        step, middle = 94 / (len(questions) + 1), left + wide / 2
        tall = 0.7 * step
        for at, (question, answer, result, color) in enumerate(questions):
            top = 95 - at * step
            box(axes, left, top - tall, wide, tall, question, BLUE)
            box(axes, right, top - tall, narrow, tall, result, color)
            arrow(axes, (left + wide, top - tall / 2), (right, top - tall / 2), answer)
            arrow(axes, (middle, top - tall), (middle, top - step), "no" if answer == "yes" else "yes")
        box(axes, left, 95 - len(questions) * step - tall, wide, tall, last, GREEN, **font)
        save(figure, f"{name}{suffix}")


def save(figure: Any, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)
