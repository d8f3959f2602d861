"""Error feedback: a drawing of its loop, and what it does to one small element, by the package's own codec."""

from __future__ import annotations

import torch
from style import BLUE, GRAY, GREEN, ORANGE, RED, arrow, box, canvas, plt, save

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform

STEPS, BLOCK, SMALL = 60, 128, 0.3


def draw_loop() -> None:
    figure, axes = canvas(9, 3.1)
    box(axes, 3, 55, 14, 22, "gradient\nof this step", GRAY)
    box(axes, 29, 55, 17, 22, "compensated\n= gradient\n+ residual", BLUE)
    box(axes, 58, 55, 13, 22, "round\nto 4 bits", BLUE)
    box(axes, 83, 55, 14, 22, "sent", GREEN, weight="bold")
    box(axes, 52, 6, 25, 22, "residual\n= compensated - sent", ORANGE)
    arrow(axes, (17, 66), (29, 66))
    arrow(axes, (46, 66), (58, 66))
    arrow(axes, (71, 66), (83, 66))
    arrow(axes, (64.5, 55), (64.5, 28), "what was lost")
    axes.plot((52, 37.5), (17, 17), color=GRAY, lw=1.2)
    arrow(axes, (37.5, 17), (37.5, 55), "in the next step")
    axes.text(50, 92, "Error feedback: what could not be sent now is sent later", ha="center", weight="bold")
    save(figure, "error_feedback")


def run(feedback: float) -> list[float]:
    """What has been decoded so far of one small element; the largest of its block is 7, so that the scale is 1."""
    codec = BlockCodec(uniform(4, BLOCK))
    residual, total, sums = torch.zeros(BLOCK), 0.0, []
    gradient = torch.full((BLOCK,), SMALL)
    gradient[1:] = torch.linspace(-7, 7, BLOCK - 1)
    for _ in range(STEPS):
        compensated = gradient + feedback * residual
        sent = codec.decode_sum(codec.encode(compensated, seed=0)[None], BLOCK)
        residual = compensated - sent
        total += float(sent[0])
        sums.append(total)
    return sums


def draw_run() -> None:
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    steps = range(1, STEPS + 1)
    axes.plot(steps, [SMALL * step for step in steps], color=GRAY, lw=3, alpha=0.5, label="sum of the gradients")
    axes.step(steps, run(1.0), where="post", color=BLUE, label="sent, with error feedback")
    axes.step(steps, run(0.0), where="post", color=RED, label="sent, without")
    axes.set(xlabel="step", ylabel="sum so far", title="A gradient of 0.3 where 4 bits know 0 and 1")
    axes.legend(frameon=False)
    save(figure, "feedback_run")


if __name__ == "__main__":
    draw_loop()
    draw_run()
