"""The decision picture of the page on local steps."""

from __future__ import annotations

from typing import Any

from style import BLUE, GREEN, GREY, arrow, box, canvas, save

QUESTIONS = (
    ("Does a step wait for the\nnetwork with loco_ddp?", "no", "loco_ddp:\nthe same algorithm", GREEN),
    ("Would loco2 or loco1\nbe enough?", "yes", "loco2_ddp, loco1_ddp:\nthe same algorithm", GREEN),
    ("May a run of thousands of\nsteps end at another loss?", "no", "wait for the network", GREY),
    ("Can a rank hold the model, or\na node, and 8 bytes more\nper parameter?", "no", "loco_hsdp", GREEN),
)


def draw(axes: Any) -> None:
    step = 100 / (len(QUESTIONS) + 1)
    for at, (question, answer, result, color) in enumerate(QUESTIONS):
        top = 97 - at * step - 2
        box(axes, 6, top - 12, 42, 12, question, BLUE)
        box(axes, 66, top - 12, 30, 12, result, color)
        arrow(axes, (48, top - 6), (66, top - 6), answer)
        arrow(axes, (27, top - 12), (27, top - step), "no" if answer == "yes" else "yes")
    box(
        axes,
        6,
        97 - len(QUESTIONS) * step - 14,
        42,
        12,
        "diloco_ddp, diloco_hsdp:\nanother algorithm",
        GREEN,
        weight="bold",
    )


if __name__ == "__main__":
    figure, axes = canvas(6.5, 6.0, units=(100, 96))
    draw(axes)
    save(figure, "outer")
