"""AdaQS on the demo's GPT: what `benchmarks/adaqs.py` recorded, a picture of docs/adaptive.md."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from style import BLUE, GRAY, HERE, ORANGE, RED, plt, save

RUN = HERE.parents[1] / "benchmarks" / "results" / "adaptive_adaqs.json"
SMOOTHED_STEPS = 10


def thresholds(decisions: list[dict[str, float]], factor: float, last_step: int) -> tuple[list[float], list[float]]:
    """What each average was compared with: a reference that this decision has set counts from the next one on."""
    steps = [*(decision["step"] for decision in decisions), last_step]
    references = [decisions[0]["reference"], *(decision["reference"] for decision in decisions)]
    return steps, [factor * reference for reference in references]


def draw(run: dict[str, Any]) -> None:
    decisions, factor = run["decisions"], run["settings"]["factor"]
    steps = [decision["step"] for decision in decisions]
    figure, (ratio, bits, loss) = plt.subplots(
        3, 1, figsize=(8, 6), sharex=True, layout="constrained", height_ratios=(3, 1.4, 2)
    )
    ratio.plot(steps, [decision["ratio"] for decision in decisions], "o-", ms=3, color=BLUE, label="ratio, averaged")
    ratio.step(
        *thresholds(decisions, factor, run["steps"]), where="pre", ls="--", color=RED, label="one level lighter below"
    )
    ratio.set(ylabel="mean / deviation", ylim=(0, None), title="AdaQS between 2, 4 and 8 bits: the demo's GPT")
    ratio.legend(frameon=False)
    bits.step(
        [0, *steps, run["steps"]],
        [decisions[0]["bits"], *(d["bits"] for d in decisions), decisions[-1]["bits"]],
        where="post",
        color=ORANGE,
    )
    bits.set(ylabel="bits", yticks=(2, 4, 8), ylim=(0, 9))
    for before, now in pairwise(decisions):
        if now["bits"] != before["bits"]:
            for axes in (ratio, bits, loss):
                axes.axvline(now["step"], color=GRAY, lw=0.8, ls=":")
    losses = [value for _, value in run["train"]]
    means = [sum(losses[at : at + SMOOTHED_STEPS]) / SMOOTHED_STEPS for at in range(len(losses) - SMOOTHED_STEPS + 1)]
    loss.plot(
        range(SMOOTHED_STEPS, len(losses) + 1), means, color=GRAY, label=f"training, mean of {SMOOTHED_STEPS} steps"
    )
    loss.plot(*zip(*run["validation"], strict=True), "o", ms=4, color=ORANGE, label="validation")
    loss.set(xlabel="optimizer step", ylabel="loss")
    loss.legend(frameon=False)
    ratio.axhline(0, color=GRAY, lw=0.8)
    save(figure, "adaqs")


if __name__ == "__main__":
    draw(json.loads(RUN.read_text()))
