"""The decision picture of the page on choosing a compressor."""

from __future__ import annotations

from typing import Any

from style import BLUE, GREEN, GREY, arrow, box, canvas, save

QUESTIONS = (
    ("Does a step wait\nfor gradients?", "no", "the framework's\nown strategy", GREY),
    ("Have you tried\nloco (4 bits)?", "no", "loco", GREEN),
    ("Do you still wait\nfor the network?", "no", "stay with loco", GREEN),
    ("Is the run many times\nlonger than 1 / density steps?", "no", "loco2, then\nloco_ternary, loco1", GREEN),
    ("Does every layer\nbear the same?", "no", "a controller:\nAccordion, ErrorBudget", GREEN),
)


def draw(axes: Any) -> None:
    step = 100 / (len(QUESTIONS) + 1)
    for at, (question, answer, result, color) in enumerate(QUESTIONS):
        top = 97 - at * step - 2
        box(axes, 6, top - 11, 40, 11, question, BLUE)
        box(axes, 66, top - 11, 30, 11, result, color, weight="bold" if result == "loco" else "normal")
        arrow(axes, (46, top - 5.5), (66, top - 5.5), answer)
        arrow(axes, (26, top - 11), (26, top - step), "yes")
    box(axes, 6, 97 - len(QUESTIONS) * step - 13, 40, 11, "topk, dgc, exdyna, powersgd:\ncompare losses first", GREEN)


if __name__ == "__main__":
    figure, axes = canvas(6.5, 6.4, units=(100, 96))
    draw(axes)
    save(figure, "choosing")
