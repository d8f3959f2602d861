"""What `Auto` compares and how it decides: pure functions of numbers that all ranks have alike.

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
from lowbit_strategy.plan.measured_loss import steps_of

WARM_STEPS = 3  # of the framework's own, before any is timed
OWN_STEPS = 6
WARM_TRIED_STEPS = 2
TRIED_STEPS = 6
MOST_TRIED = 2
WORTH_IT = 0.97  # of the framework's own step: what is not faster than that is not worth having
HOPEFUL = 1.1  # of it: what is predicted to be slower is not tried
RIGHT_WITHIN = 0.85  # of what is predicted: a step may be so much faster
CERTAIN = 0.8  # of all pairs of two steps: so often the one is faster, which chance does one time in twenty
LIKELY = 0.65  # of them, where it was predicted to be, from links that were measured apart
CHANGED = 4 / 3  # or its inverse, of the step when it was chosen: look again


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set-up that may be tried.

    Args:
        name: For reports.
        compressor: Of gradients.
        weights: How FSDP2's weights travel; None under DDP.
        steps: Times those of uncompressed training that it needs to the same loss (`measured_loss`).
    """

    name: str
    compressor: Compressor
    weights: WeightCoding | None = None
    steps: float = 1.0


def candidates(auto: Auto, layout: Layout, weights: WeightCoding | None) -> list[Candidate]:
    """Everything within the bound of loss.

    Args:
        auto: What the user has asked for.
        layout: What wraps the model.
        weights: Chosen by the user; None: not chosen.
    """
    names = ("loco4",) if auto.quality == "same" else ("loco4", "loco2")  # the bytes of loco, and fewer steps
    found = [Candidate(name, _keeping(PRESETS[name], auto), None, steps_of(name)) for name in names]
    if layout != "fsdp":  # FSDP2 has a type for reduction of its own, mp_policy
        found.append(Candidate("bf16", Dense(dtype="bfloat16")))
    if layout == "ddp":
        return found
    if weights is not None or layout == "hsdp":
        return [replace(each, weights=weights or Exact()) for each in found]
    codings: tuple[tuple[str, WeightCoding], ...] = (("", WeightCode()), (", exact weights", Exact()))
    return [replace(each, name=each.name + words, weights=coding) for each in found for words, coding in codings]


def _keeping(compressor: Compressor, auto: Auto) -> Compressor:
    """With what the user has chosen for single parameters."""
    defaults = {field.name: field.default for field in fields(Compressor)}
    chosen = {name: getattr(auto, name) for name, value in defaults.items() if getattr(auto, name) != value}
    return replace(compressor, **chosen)


@dataclass(frozen=True, slots=True)
class Timed:
    """Steps of one set-up that were timed.

    Args:
        name: For reports.
        seconds: Of each.
        steps: Times those of uncompressed training that it needs to the same loss.
        predicted: What its `cost` was predicted to be; None: nothing was.
    """

    name: str
    seconds: tuple[float, ...]
    steps: float = 1.0
    predicted: float | None = None

    @property
    def median(self) -> float:
        """Of an even number of steps the lower of the two in the middle: what disturbs a step makes it longer."""
        return statistics.median_low(self.seconds)

    @property
    def cost(self) -> float:
        """Seconds for what a step of uncompressed training achieves."""
        return self.steps * self.median

    @property
    def middle(self) -> tuple[float, float]:
        """Between what the middle half of them lies."""
        ordered, out = sorted(self.seconds), len(self.seconds) // 4
        return ordered[out], ordered[-1 - out]

    def is_certainly_faster(self, other: Timed) -> bool:
        """Whether in most pairs of a step of each this is the faster one, as Mann and Whitney count them. Where it was
        predicted to be, fewer pairs are enough.
        """
        pairs = [self.steps * own < seconds for own in self.seconds for seconds in other.seconds]
        is_predicted = self.predicted is not None and self.predicted <= RIGHT_WITHIN * other.median
        return sum(pairs) >= (LIKELY if is_predicted else CERTAIN) * len(pairs)

    def __str__(self) -> str:
        low, high = self.middle
        more = f", {self.steps:.3g} times the steps" if self.steps > 1 else ""
        return f"{self.name} {self.median:.3g} s ({low:.3g} to {high:.3g}{more})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is used from now on: number `chosen` of what was tried; None: nothing of it. And why, in a sentence."""

    chosen: int | None
    reason: str


def hopeful(predicted: Sequence[float], own_s: float) -> list[int]:
    """Numbers of the candidates to try, the most promising first, from what is predicted that each costs (`cost`)."""
    order = sorted(range(len(predicted)), key=lambda at: predicted[at])
    return [at for at in order[:MOST_TRIED] if predicted[at] < HOPEFUL * own_s]


def decide(own: Timed, tried: Sequence[Timed]) -> Verdict:
    """The fastest of what is certainly faster than the framework's own."""
    if not tried:
        return Verdict(None, "no candidate is predicted to be faster than the framework's own step")
    measured = ", ".join(str(each) for each in (own, *tried))
    faster = [at for at, each in enumerate(tried) if each.cost <= WORTH_IT * own.median]
    if not faster:
        return Verdict(None, f"nothing that was tried is faster than the framework's own step: {measured}")
    certain = [at for at in faster if tried[at].is_certainly_faster(own)]
    if not certain:
        return Verdict(None, f"step times vary too much to tell what is faster, so nothing is changed: {measured}")
    best = min(certain, key=lambda at: tried[at].cost)
    return Verdict(best, f"{own.median / tried[best].cost:.2f} times as fast as the framework's own step: {measured}")


class Trial:
    """Whose steps come next while candidates are tried, and how long they took.

    Args:
        own: The framework's own steps.
        waiting: What to try, the most promising first, and what a step of it is predicted to cost.
    """

    def __init__(self, own: Timed, waiting: Sequence[tuple[Candidate, float]]) -> None:
        self.own = own
        self.tried: list[Candidate] = []
        self.times: list[Timed] = []
        self._waiting = list(waiting)
        self._left = MOST_TRIED * (WARM_TRIED_STEPS + TRIED_STEPS)
        self._predicted = 0.0  # of what is being tried

    def next(self) -> tuple[Candidate, int, int] | None:
        """Whose steps come next, how many, and of how many the times count; None: it can be decided.

        What was tried goes on with all steps that are left where nothing waits that could be sooner: predictions are
        within 15 %.
        """
        if self.tried and self._left and not any(self._may_be_sooner(cost) for _, cost in self._waiting):
            steps, self._left = self._left, 0
            self._waiting.clear()
            return self.tried[-1], steps, steps
        if not self._waiting:
            return None
        steps = WARM_TRIED_STEPS + TRIED_STEPS
        self._left -= steps
        candidate, self._predicted = self._waiting.pop(0)
        return candidate, steps, TRIED_STEPS

    def _may_be_sooner(self, predicted: float) -> bool:
        return RIGHT_WITHIN * predicted < min(times.cost for times in self.times)

    def record(self, candidate: Candidate, seconds: Sequence[float]) -> None:
        """How long its steps took, on the slowest rank."""
        before: tuple[float, ...] = ()
        if self.tried and self.tried[-1] is candidate:
            before = self.times.pop().seconds
        else:
            self.tried.append(candidate)
        self.times.append(Timed(candidate.name, (*before, *seconds), candidate.steps, self._predicted))

    @property
    def more_s(self) -> float:
        """Seconds that the candidates' steps took beyond as many of the framework's own."""
        return sum(max(0.0, sum(each.seconds) - len(each.seconds) * self.own.median) for each in self.times)


def has_changed(seconds: float, reference_s: float) -> bool:
    """Whether steps take a third more or less than when the choice was made."""
    return not reference_s / CHANGED < seconds < reference_s * CHANGED
