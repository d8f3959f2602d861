"""What `Auto` times and how it decides: pure functions of numbers that all ranks have alike.

References:
    Mann & Whitney, "On a Test of Whether one of Two Random Variables is Stochastically Larger than the Other", 1947.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.auto import Auto
from lowbit_strategy.methods.quantization.dense import Dense
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.methods.weights.weightcode import WeightCode
from lowbit_strategy.plan.gradients import Layout

WARM_STEPS = 3  # of the framework's own, before any is timed
OWN_STEPS = 8
WARM_TRIED_STEPS = 2  # DDP rebuilds its buckets after the first
MOST_TIMED_STEPS = 8  # of one candidate
MOST_TRIED_STEPS = 20  # of all candidates, with the one that sends their residuals
TOO_SLOW = 2.0  # times the framework's own step: a candidate whose first timed step takes longer is given up
WORTH_IT = 0.97  # of the framework's own step: what is not faster than that is not worth having
CERTAIN = 0.8  # of all pairs of two steps: so often the one is faster, which chance does one time in thirty
CHANGED = 1.5  # or its inverse, of the step when it was chosen: look again


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set-up that is tried.

    Args:
        name: For reports.
        compressor: Of gradients.
        weights: How FSDP2's weights travel; None under DDP.
    """

    name: str
    compressor: Compressor
    weights: WeightCoding | None = None


def candidates(auto: Auto, layout: Layout, weights: WeightCoding | None) -> list[Candidate]:
    """What is tried, in this order.

    Args:
        auto: What the user has asked for.
        layout: What wraps the model.
        weights: Chosen by the user; None: not chosen.
    """
    found = [Candidate("loco4", _keeping(PRESETS["loco4"], auto))]
    if auto.quality == "close":
        found.append(Candidate("loco2", _keeping(PRESETS["loco2"], auto)))
    if layout != "fsdp":  # FSDP2 has a type for reduction of its own, mp_policy
        found.append(Candidate("bf16", Dense(dtype="bfloat16")))
    if layout == "ddp":
        return found
    if weights is not None or layout == "hsdp":
        return [replace(each, weights=weights or Exact()) for each in found]
    exact = replace(found[0], name=f"{found[0].name}, exact weights", weights=Exact())
    return [*(replace(each, weights=WeightCode()) for each in found), exact]


def _keeping(compressor: Compressor, auto: Auto) -> Compressor:
    """With what the user has chosen for single parameters."""
    defaults = {field.name: field.default for field in fields(Compressor)}
    chosen = {name: getattr(auto, name) for name, value in defaults.items() if getattr(auto, name) != value}
    return replace(compressor, **chosen)


def num_timed(num_candidates: int) -> int:
    """Steps of each candidate that are timed, so that all together take at most `MOST_TRIED_STEPS`."""
    return min(MOST_TIMED_STEPS, (MOST_TRIED_STEPS - 1) // num_candidates - WARM_TRIED_STEPS)


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of one set-up that were timed.

    Args:
        name: For reports.
        seconds: Of each.
    """

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of an even number of steps the lower of the two in the middle: what disturbs a step makes it longer."""
        return statistics.median_low(self.seconds)

    def is_certainly_faster(self, other: Timed) -> bool:
        """Whether in most pairs of a step of each this is the faster one, as Mann and Whitney count them."""
        pairs = [own < seconds for own in self.seconds for seconds in other.seconds]
        return sum(pairs) >= CERTAIN * len(pairs)

    def __str__(self) -> str:
        ordered, out = sorted(self.seconds), len(self.seconds) // 4
        return f"{self.name} {self.median:.3g} s ({ordered[out]:.3g} to {ordered[-1 - out]:.3g})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is used from now on: number `chosen` of what was tried; None: nothing of it. And why, in a sentence."""

    chosen: int | None
    reason: str


def decide(own: Timed, tried: Sequence[Timed]) -> Verdict:
    """The fastest of what is certainly faster than the framework's own."""
    if not tried:
        return Verdict(None, "no candidate fits into the memory")
    measured = ", ".join(str(each) for each in (own, *tried))
    faster = [at for at, each in enumerate(tried) if each.median <= WORTH_IT * own.median]
    if not faster:
        return Verdict(None, f"nothing that was tried is faster than the framework's own step: {measured}")
    certain = [at for at in faster if tried[at].is_certainly_faster(own)]
    if not certain:
        return Verdict(None, f"step times vary too much to tell what is faster, so nothing is changed: {measured}")
    best = min(certain, key=lambda at: tried[at].median)
    return Verdict(best, f"{own.median / tried[best].median:.2f} times as fast as the framework's own step: {measured}")


def has_changed(seconds: float, reference_s: float) -> bool:
    """Whether steps take much longer or shorter than when the choice was made."""
    return not reference_s / CHANGED < seconds < reference_s * CHANGED
