"""Whether compression pays: recommended only where it does for all figures within their ranges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowbit_strategy.advisor.advice import SetupOption, Workload
from lowbit_strategy.advisor.cost import StepTime
from lowbit_strategy.advisor.inputs import Figure, Situation, What
from lowbit_strategy.advisor.measured_loss import Quality
from lowbit_strategy.advisor.units import rounded

ADVISE_MIN_SPEEDUP = 1.05  # times as fast: less is not worth the trouble
BENCH_MINUTES = 2
_ROOM = 0.9  # of a device's memory: activations and the framework need the rest
_BISECTIONS = 14
_FURTHEST = 1e4  # times a figure, in which a flip is looked for


@dataclass(frozen=True, slots=True)
class Gain:
    """How many times as fast as the framework's own in bf16 a set-up reaches the same loss."""

    likely: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.likely:.3g} times as fast as without compression ({self.low:.2g} to {self.high:.2g})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Args:
        answer: ``use``: it pays for all figures within their ranges. ``measure``: it probably does. ``no``.
        choice: The fastest set-up that keeps the loss and fits; None: there is none.
        gain: Of that.
        sentence: For the user.
        flips: Where the answer would be another one, each a sentence.
    """

    answer: Literal["use", "measure", "no"]
    choice: SetupOption | None
    gain: Gain | None
    sentence: str
    flips: tuple[str, ...] = ()


def decide(
    found: Sequence[SetupOption], workload: Workload, situation: Situation, quality: Quality = "same"
) -> Verdict:
    """Compare the fastest set-up of that quality that fits with the framework's own.

    Args:
        found: All set-ups, timed.
        workload: Model and ranks.
        situation: What they were timed with.
        quality: ``close``: also what has fewer than 4 bits.
    """
    if workload.world_size == 1:
        return Verdict("no", None, None, "Do not use this package here: one rank sends nothing.")
    allowed = ("same",) if quality == "same" else ("same", "close")
    ours = [choice for choice in found if choice.line and choice.quality in allowed]
    fits = [choice for choice in ours if _fits(choice, workload, situation)]
    own = [choice for choice in found if choice.name.endswith("bf16") and _fits(choice, workload, situation)]
    if not fits:
        return Verdict("no", None, None, _too_large(ours, own, workload, situation))
    best = min(fits, key=lambda choice: choice.seconds)
    gain, worst = gain_of(best, own, situation)
    flips = tuple(_flips(best, own, situation, worst, recommended=gain.low > ADVISE_MIN_SPEEDUP))
    if gain.low > ADVISE_MIN_SPEEDUP:
        return Verdict("use", best, gain, f"Use: {best.line}: {gain}.", flips)
    if gain.likely > ADVISE_MIN_SPEEDUP:
        return Verdict(
            "measure", best, gain, f"Measure: {best.name} is probably {gain}: {_how(situation, workload)}.", flips
        )
    return Verdict("no", best, gain, f"Do not use this package here: {best.name} would be {gain}.", flips)


def _fits(choice: SetupOption, workload: Workload, situation: Situation) -> bool:
    limit = situation.memory_nbytes
    return limit is None or choice.held_nbytes(workload) <= _ROOM * limit


def _too_large(
    ours: Sequence[SetupOption], own: Sequence[SetupOption], workload: Workload, situation: Situation
) -> str:
    assert situation.memory_nbytes is not None
    least = min(ours, key=lambda choice: choice.held_nbytes(workload))
    needs = f"{least.name} needs {rounded(least.held_nbytes(workload) / 1e9)} GB before activations"
    limit = f"{rounded(situation.memory_nbytes / 1e9)} GB of a device ({situation.memory_source})"
    alone = "the framework's own does" if own else "nor does the framework's own"
    return f"Do not use this package here: with its defaults no set-up fits into the {limit}, {alone}; {needs}."


def _how(situation: Situation, workload: Workload) -> str:
    slowest = "link" if workload.nodes > 1 else "inside"
    if any(each.source == "measured" and each.what == slowest for each in situation.figures):
        return "time a hundred steps of each"
    machines = " on two machines" if workload.nodes > 1 else ""
    return f"`lowbit bench`{machines} takes {BENCH_MINUTES} minutes and narrows this"


def gain_of(choice: SetupOption, own: Sequence[SetupOption], situation: Situation) -> tuple[Gain, dict[What, float]]:
    """The gain over the fastest of the framework's own, and the ends of the figures' ranges at which it is least.

    1. likely: the figures as they are
    2. low: of all figures at either end of their ranges where compression gains least, while the framework overlaps all
       that it can and compression nothing
    3. high: the other way round
    """
    names = [each.what for each in situation.figures]
    ends = itertools.product(*((each.best, each.worst) for each in situation.figures))
    corners: list[dict[What, float]] = [dict(zip(names, each, strict=True)) for each in ends]
    gains = [_gain_at(choice, own, situation.at(corner)) for corner in corners]
    found = _gain_at(choice, own, situation)
    worst = min(zip(gains, corners, strict=True), key=lambda each: each[0].low)[1]
    gains.append(found)
    return Gain(found.likely, min(each.low for each in gains), max(each.high for each in gains)), worst


def _gain_at(choice: SetupOption, own: Sequence[SetupOption], situation: Situation) -> Gain:
    """Where the figures are certain. `own`: the framework's own that fit; none: the gain is infinite."""
    more_steps = 1.0 if choice.steps is None else choice.steps.times
    ours = situation.coding_as(choice.preset).step(choice.plan)
    theirs = [situation.step(each.plan) for each in own] or [StepTime(math.inf, math.inf, math.inf)]
    return Gain(
        min(each.seconds for each in theirs) / (more_steps * ours.seconds),
        min(each.low for each in theirs) / (more_steps * ours.high),
        min(each.high for each in theirs) / (more_steps * ours.low),
    )


def _flips(
    choice: SetupOption,
    own: Sequence[SetupOption],
    situation: Situation,
    worst: dict[What, float],
    *,
    recommended: bool,
) -> list[str]:
    """How far bandwidths are from where it would not be recommended any more, or would be."""
    found = []
    for figure in situation.figures:
        if figure.what not in _FLIPS:
            continue

        def pays(times: float, what: What = figure.what) -> bool:
            return _gain_at(choice, own, situation.at({**worst, what: times * worst[what]})).low > ADVISE_MIN_SPEEDUP

        times = _first(pays, recommended=recommended)
        if times is not None:
            rather = "would not be recommended" if recommended else "would be recommended"
            found.append(f"{rather} {_FLIPS[figure.what][not recommended].format(_rate(figure, times))}")
    return found


_FLIPS: Mapping[What, tuple[str, str]] = {  # where a recommendation ends, and where one begins
    "link": ("from {} on", "below {}"),
    "inside": ("with more than {} inside a node", "with less than {} inside a node"),
}


def _first(pays: Callable[[float], bool], *, recommended: bool) -> float | None:
    """By which multiple of a bandwidth, up or down, the answer changes; None: it does not within a wide range."""
    same, other = 1.0, _FURTHEST if recommended else 1 / _FURTHEST
    if pays(other) is recommended:
        return None
    for _ in range(_BISECTIONS):
        middle = (same * other) ** 0.5
        same, other = (middle, other) if pays(middle) is recommended else (same, middle)
    return other


def _rate(figure: Figure, times: float) -> str:
    value = times * figure.value * (8 if figure.what == "link" else 1) / 1e9
    return f"{rounded(value, 2)} {'Gbit/s' if figure.what == 'link' else 'GB/s'}"
