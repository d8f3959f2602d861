"""Which set-up suits a model and its links: every sensible one predicted and compared, and whether one pays.

It is recommended only where it pays for all figures within their ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lowbit_strategy.advisor.cost import StepTime, break_even, over_bandwidth
from lowbit_strategy.advisor.inputs import Figure, Situation, What
from lowbit_strategy.advisor.measured_loss import STEPS, Loss, MoreSteps, Quality, quality_of, steps_of, worst_loss
from lowbit_strategy.advisor.units import rounded
from lowbit_strategy.advisor.workload import Workload, assign, plan_for, topology_for, uncompressed
from lowbit_strategy.methods.outer.published import OUTER_RULES
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.weights import default_weights
from lowbit_strategy.plan import fitting
from lowbit_strategy.plan.gradients import Layout
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.plan.plan import StepPlan

BITS = {"loco": 4, "loco2": 2, "loco1": 1, "powersgd": 1}  # of what is shown; of PowerSGD fewer than that
_COMPRESSED = tuple((name, quality_of(name, bits)) for name, bits in BITS.items())
_SQUARES = "*"  # after the name of what has second_moment=True
_SQUARES_LINES = {
    "ddp": 'strategy=LowBitDDPStrategy("{}", second_moment=True)',
    "fsdp": 'strategy=LowBitFSDPStrategy("{}", second_moment=True)',
    "hsdp": 'strategy=LowBitFSDPStrategy("{}", shard_size="node", second_moment=True)',
}
ADVISE_MIN_SPEEDUP = 1.05  # times as fast: less is not worth the trouble
BENCH_MINUTES = 2
_ROOM = 0.9  # of a device's memory: activations and the framework need the rest
_BISECTIONS = 14
_FURTHEST = 1e4  # times a figure, in which a flip is looked for


@dataclass(frozen=True, slots=True)
class SetupOption:
    """One set-up and what it costs.

    Args:
        name: The strategy's, with a star where it has ``second_moment=True``; ``ddp`` and ``fsdp`` with a type of float
            are the framework's own.
        line: What to paste; empty for the framework's own.
        plan: What it sends and keeps.
        time: Of a step; None: without links there is no prediction.
        quality: What is known of its loss (`quality_of`); ``local``: ranks train by themselves, which is another
            algorithm.
        loss: Measured, of the model where it is highest; None: of the framework's own, or never measured.
        break_even: Bytes per second between nodes below which it comes to the same loss sooner than bf16.
        steps: How many more it needs to the same loss; None: of the framework's own, or never measured.
    """

    name: str
    line: str
    plan: StepPlan
    time: StepTime | None = None
    quality: Quality = "same"
    break_even: float | None = None
    loss: Loss | None = None
    steps: MoreSteps | None = None

    @property
    def preset(self) -> str:
        """The name of its compressor."""
        return self.name.removesuffix(_SQUARES).rpartition("_")[0]

    @property
    def seconds(self) -> float:
        """Step time multiplied by the measured increase in steps."""
        assert self.time is not None
        return self.time.seconds * (1.0 if self.steps is None else self.steps.times)

    @property
    def between_nbytes(self) -> float:
        """Bytes per step that leave the node, of one rank."""
        plan = self.plan
        return _leaving(plan.gradients) + _leaving(plan.weights) + _leaving(plan.rounds + plan.state) / plan.every

    def held_nbytes(self, workload: Workload) -> int:
        """What a rank holds for the model: weights, gradients, two moments in float32, and what compression keeps."""
        ranks = {"ddp": 1, "fsdp": workload.world_size, "hsdp": workload.ranks_per_node}[self.plan.layout]
        return round(workload.numel * (2 * workload.itemsize + 8) / ranks) + self.plan.memory.total


def _leaving(transfers: Sequence[TransferGroup]) -> float:
    return sum(
        each.total_nbytes * each.internode_fraction * transfer.repeats
        for transfer in transfers
        for each in transfer.messages
    )


def kept(workload: Workload) -> list[fitting.MemoryOption]:
    """What ``loco_fsdp`` may keep, from its defaults down to what `memory=` can bring it to."""
    compressor = PRESETS["loco"]
    setup = fitting.Setup(
        specs=workload.specs, topology=topology_for(workload, "fsdp"), layout="fsdp", modules=workload.modules
    )
    coding = default_weights(compressor)
    return list(fitting.memory_options(compressor, coding, setup, may_recode=True))


def setup_options(workload: Workload, situation: Situation | None = None) -> list[SetupOption]:
    """Every sensible set-up, the framework's own first; the fastest of each layout before the others.

    Args:
        workload: Model and ranks.
        situation: Links and computing; None: bytes and memory only.
    """
    found: list[SetupOption] = []
    assigned = {name: assign(workload, PRESETS[name]) for name in ("dense", *(name for name, _ in _COMPRESSED))}
    for layout in _layouts(workload):
        base = plan_for(workload, layout, PRESETS["dense"], assigned=assigned["dense"])
        half = uncompressed(base, 2)
        own = [_timed("float32", uncompressed(base, 4), situation), _timed("bf16", half, situation)]
        against = None if situation is None else over_bandwidth(half, situation.cluster, situation.compute_s)
        ours = []
        for name, quality in _COMPRESSED:
            plan = plan_for(workload, layout, PRESETS[name], assigned=assigned[name])
            ours.append(_timed(name, plan, situation, against, quality))
            if (starred := name + _SQUARES) in STEPS and not (layout == "ddp" and workload.ranks_per_node > 1):
                plan = plan_for(workload, layout, PRESETS[name], assigned=assigned[name], squares=True)
                ours.append(_timed(starred, plan, situation, against, quality))
        if layout != "fsdp":
            rule = OUTER_RULES["diloco"]
            plan = plan_for(workload, layout, rule.compressor(), outer=rule)
            ours.append(_timed("diloco", plan, situation, against, "local"))
        found += own + (ours if situation is None else sorted(ours, key=lambda choice: choice.seconds))
    return found


def _layouts(workload: Workload) -> tuple[Layout, ...]:
    return ("ddp", "fsdp", "hsdp") if workload.nodes > 1 and workload.ranks_per_node > 1 else ("ddp", "fsdp")


def _timed(
    name: str,
    plan: StepPlan,
    situation: Situation | None,
    against: Callable[[float], float] | None = None,
    quality: Quality | None = None,
) -> SetupOption:
    """`against`: the framework's own in bf16, over the bandwidth. No `quality`: this is the framework's own."""
    if quality is None:
        return SetupOption(f"{plan.layout}, {name}", "", plan, None if situation is None else situation.predicted(plan))
    preset, star = name.removesuffix(_SQUARES), _SQUARES * name.endswith(_SQUARES)
    full, known = f"{preset}_{plan.layout}", (worst_loss(name), STEPS.get(name))
    line = _SQUARES_LINES[plan.layout].format(preset) if star else f'strategy="{full}"'
    if situation is None or against is None:
        return SetupOption(full + star, line, plan, None, quality, None, *known)
    own = situation.coding_as(preset)
    even = break_even(over_bandwidth(plan, own.cluster, own.compute_s), against, steps_of(name))
    return SetupOption(full + star, line, plan, own.predicted(plan), quality, even, *known)


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
