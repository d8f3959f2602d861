"""Predicts and compares every sensible set-up for a model and its links, and decides whether one pays off.

A set-up is recommended only if it pays off for all figures within their ranges.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lowbit_strategy import leaves
from lowbit_strategy.advisor.cluster import ANY_RATE
from lowbit_strategy.advisor.cost import StepTime, over_bandwidth
from lowbit_strategy.advisor.inputs import Situation, What
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.advisor.workload import (
    HELD_PER_PARAM,
    Workload,
    assign,
    plan_for,
    topology_for,
)
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.fitting.memory import Memory, memory_of
from lowbit_strategy.fitting.ways import MemoryOption, Setup, memory_options
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.weight_codings import default_weights
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.plan.plan import StepPlan

Quality = Literal["same", "close", "worse", "local"]
Answer = Literal["use", "measure", "no"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The cost of a preset on small models compared with the same runs without compression, on the model where it is
    largest.

    The figures come from `benchmarks/results`; a test compares them.

    Args:
        quality: ``same``: 4 bits, and no loss of a model is higher by more than chance. ``close``: at most half a per
            cent higher on every model. ``worse``: more than that. ``local``: ranks train separately, which is a
            different algorithm.
        loss: Percentage by which the validation loss is higher, the mean of the seeds.
        error: Standard error of that mean.
        steps: Percentage of additional steps to the same loss, at the learning rate that is best without compression or
            at a quarter of it, constant or decaying; None: it was not measured.
    """

    quality: Quality
    loss: float
    error: float
    steps: float | None = None

    @property
    def times(self) -> float:
        """The number of steps relative to uncompressed training."""
        return 1 + max(0.0, self.steps or 0.0) / 100


SQUARES = "*"  # suffix of names with second_moment=True
MEASURED = {
    "loco": Measured("same", -0.012, 0.153, 1.0),
    "loco2": Measured("close", 0.110, 0.429, 6.9),
    "loco2*": Measured("close", 0.021, 0.482, 6.9),
    "loco1": Measured("close", 0.332, 0.092, 20.8),
    "loco1*": Measured("close", 0.115, 0.490, 1.5),
    "powersgd": Measured("worse", 11.391, 0.658),
    "diloco": Measured("local", 30.024, 0.824),
}
COMPARED = tuple(name for name in MEASURED if name in PRESETS)
ADVISE_MIN_SPEEDUP = 1.05  # times as fast: less is not worth it
# Times as fast, at the best end of the range, from which measuring is worth it. That end assumes that everything favors
# compression at once. Where compression paid although the likely figure said no, it was 1.65 or more.
MEASURE_MIN_SPEEDUP = 1.5
BENCH_MINUTES = 2
_RULES = leaves.NAMES["OUTER_RULES"]
_OF_SQUARES = "lowbit_strategy.second_moment.planned:Squares"
_ROOM = 0.9  # fraction of a device's memory: activations and the framework need the rest


@dataclass(frozen=True, slots=True)
class SetupOption:
    """One set-up and its costs.

    Args:
        name: The strategy's, with a star where it has ``second_moment=True``; ``ddp`` and ``fsdp`` with a type of float
            are the framework's own.
        line: The line to paste; empty for the framework's own.
        plan: Its messages and memory.
        held_per_param: Bytes for weight, gradient and two moments.
        time: Time of a step; None: without links there is no prediction.
        measured: Measurements of its loss; None for the framework's own.
        break_even: Bytes per second between nodes below which it reaches the same loss sooner than the set-up it is
            compared with.
    """

    name: str
    line: str
    plan: StepPlan
    held_per_param: int
    time: StepTime | None = None
    measured: Measured | None = None
    break_even: float | None = None

    @property
    def preset(self) -> str:
        """The name of its compressor."""
        return self.name.removesuffix(SQUARES).rpartition("_")[0]

    @property
    def more_steps(self) -> float:
        """The number of steps to the same loss, relative to the framework's own."""
        return 1.0 if self.measured is None else self.measured.times

    @property
    def seconds(self) -> float:
        """Step time multiplied by the measured increase in steps."""
        assert self.time is not None
        return self.time.seconds * self.more_steps

    @property
    def between_nbytes(self) -> float:
        """Bytes per step that leave the node, of one rank."""
        plan = self.plan
        return _leaving(plan.gradients) + _leaving(plan.weights) + _leaving(plan.rounds + plan.extra) / plan.every

    @property
    def memory(self) -> Memory:
        """The memory that compression keeps."""
        return Memory() if self.measured is None else memory_of(self.plan)

    def held_nbytes(self, workload: Workload) -> int:
        """Bytes that a rank holds for the model: weights, gradients, two moments, and compression's state."""
        ranks = {"ddp": 1, "fsdp": workload.world_size, "hsdp": workload.ranks_per_node}[self.plan.wrapper]
        return round(workload.numel * self.held_per_param / ranks) + self.memory.total

    def fits(self, workload: Workload, situation: Situation) -> bool:
        """Whether that leaves room for activations."""
        limit = situation.memory_nbytes
        return limit is None or self.held_nbytes(workload) <= _ROOM * limit


def _leaving(transfers: Sequence[TransferGroup]) -> float:
    return sum(
        each.total_nbytes * each.internode_fraction * transfer.repeats
        for transfer in transfers
        for each in transfer.messages
    )


def kept(workload: Workload) -> list[MemoryOption]:
    """The memory options of ``loco_fsdp``, from its defaults down to the least that `memory=` allows."""
    compressor = PRESETS["loco"]
    setup = Setup(
        specs=workload.specs, topology=topology_for(workload, "fsdp"), wrapper="fsdp", modules=workload.modules
    )
    return list(memory_options(compressor, default_weights(compressor), setup, may_recode=True))


def setup_options(workload: Workload, situation: Situation | None = None) -> list[SetupOption]:
    """Every sensible set-up, the framework's own first; the fastest of each wrapper before the others.

    Args:
        workload: Model and ranks.
        situation: Links and computing; None: bytes and memory only.
    """
    found: list[SetupOption] = []
    assigned = {name: assign(workload, PRESETS[name]) for name in ("dense", *COMPARED)}
    several = workload.ranks_per_node > 1
    wrappers: tuple[Wrapper, ...] = ("ddp", "fsdp", "hsdp") if workload.nodes > 1 and several else ("ddp", "fsdp")
    for wrapper in wrappers:
        base = plan_for(workload, wrapper, PRESETS["dense"], assigned=assigned["dense"])
        against = None
        for itemsize, name, held in ((4, "float32", HELD_PER_PARAM), (2, "bf16", workload.held_per_param)):
            own = uncompressed(base, itemsize, itemsize)
            time = None if situation is None else situation.predicted(own)
            found.append(SetupOption(f"{wrapper}, {name}", "", own, held, time))
            if situation is not None and name == workload.baseline:
                against = over_bandwidth(own, situation.cluster, situation.compute_s)
        ours = []
        for name in MEASURED:
            preset, squares = name.removesuffix(SQUARES), name.endswith(SQUARES)
            if preset in leaves.RULES:
                if wrapper == "fsdp" or not leaves.is_present(_RULES):
                    continue
                rule = leaves.load(_RULES, preset)[preset]
                plan = plan_for(workload, wrapper, rule.compressor(), round_plan=rule.planned())
            elif squares and ((wrapper == "ddp" and several) or not leaves.is_present(_OF_SQUARES)):
                continue
            else:
                extra = leaves.load(_OF_SQUARES, name)() if squares else None
                plan = plan_for(workload, wrapper, PRESETS[preset], assigned=assigned[preset], extra=extra)
            ours.append(_ours(name, plan, workload, situation, against))
        found += ours if situation is None else sorted(ours, key=lambda choice: choice.seconds)
    return found


def _ours(
    name: str,
    plan: StepPlan,
    workload: Workload,
    situation: Situation | None,
    against: Callable[[float], float] | None,
) -> SetupOption:
    """`against`: the framework's own, over the bandwidth of one part of the model."""
    preset, measured, held = name.removesuffix(SQUARES), MEASURED[name], workload.held_per_param
    full = f"{preset}_{plan.wrapper}"
    line = _line(name, plan, workload.tensor_parallel)
    full += name.removeprefix(preset)
    if situation is None or against is None:
        return SetupOption(full, line, plan, held, measured=measured)
    own = situation.coding_as(preset)
    even = break_even(over_bandwidth(plan, own.cluster, own.compute_s), against, measured.times)
    even = None if even is None else even * workload.tensor_parallel
    return SetupOption(full, line, plan, held, own.predicted(plan), measured, even)


def _line(name: str, plan: StepPlan, tensor_parallel: int) -> str:
    """The line that a user writes."""
    preset = name.removesuffix(SQUARES)
    if name == preset and tensor_parallel == 1:
        return f'strategy="{preset}_{plan.wrapper}"'
    given = [f'"{preset}"' if plan.round_plan is None else f'outer="{preset}"']
    if tensor_parallel > 1 and plan.wrapper != "ddp":
        given.append(f"tensor_parallel_size={tensor_parallel}")
    if plan.wrapper == "hsdp":
        given.append('shard_size="node"')
    if name != preset:
        given.append("second_moment=True")
    if tensor_parallel > 1 and plan.wrapper == "ddp":
        return f"compress(model, optimizer, {', '.join(given)})"
    return f"strategy=LowBit{'DDP' if plan.wrapper == 'ddp' else 'FSDP'}Strategy({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Gain:
    """The factor by which a set-up reaches the same loss faster than the framework's own."""

    likely: float
    low: float
    high: float
    baseline: str = "bf16"  # dtype of the framework's own

    def __str__(self) -> str:
        ends = f"{self.low:.2g} to {self.high:.2g}"
        return f"{self.likely:.3g} times as fast as {self.baseline} without compression ({ends})"

    @property
    def answer(self) -> Answer:
        """A plain yes needs the lower end to pay off; a plain no needs the upper end not to be worth measuring."""
        if self.low > ADVISE_MIN_SPEEDUP:
            return "use"
        if self.likely > ADVISE_MIN_SPEEDUP or self.high >= MEASURE_MIN_SPEEDUP:
            return "measure"
        return "no"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer.

    Args:
        answer: ``use``: it pays off for all figures within their ranges. ``measure``: it may. ``no``: it does not.
        choice: The fastest set-up that keeps the loss and fits; None: there is none.
        gain: Gain of that set-up.
        sentence: The message for the user.
    """

    answer: Answer
    choice: SetupOption | None
    gain: Gain | None
    sentence: str


def decide(found: Sequence[SetupOption], workload: Workload, situation: Situation, *, close: bool = False) -> Verdict:
    """Compare the fastest set-up that keeps the loss and fits with the framework's own.

    Args:
        found: All set-ups, timed.
        workload: Model and ranks.
        situation: The links and compute with which they were timed.
        close: Whether to include set-ups with fewer than 4 bits.
    """
    if workload.world_size == 1:
        return Verdict("no", None, None, "Do not use this package here: one rank sends nothing.")
    allowed = ("same", "close") if close else ("same",)
    ours = [choice for choice in found if choice.measured is not None and choice.measured.quality in allowed]
    fits = [choice for choice in ours if choice.fits(workload, situation)]
    own = [choice for choice in found if choice.name.endswith(workload.baseline) and choice.fits(workload, situation)]
    if not fits:
        return Verdict("no", None, None, _too_large(ours, own, workload, situation))
    best = min(fits, key=lambda choice: choice.seconds)
    gain = replace(gain_of(best, own, situation), baseline=workload.baseline)
    likely = f"{best.name} is probably" if gain.likely > ADVISE_MIN_SPEEDUP else f"it may help, {best.name} is probably"
    sentences: dict[Answer, str] = {
        "use": f"Use: {best.line}: {gain}.",
        "measure": f"Measure: {likely} {gain}: {_how(situation, workload, best.plan.wrapper)}.",
        "no": f"Do not use this package here: {best.name} would be {gain}.",
    }
    return Verdict(gain.answer, best, gain, sentences[gain.answer])


def _too_large(
    ours: Sequence[SetupOption], own: Sequence[SetupOption], workload: Workload, situation: Situation
) -> str:
    assert situation.memory_nbytes is not None
    least = min(ours, key=lambda choice: choice.held_nbytes(workload))
    needs = f"{least.name} needs {size(least.held_nbytes(workload))} before activations"
    limit = f"{size(situation.memory_nbytes)} of a device ({situation.memory_source})"
    alone = "the framework's own does" if own else "nor does the framework's own"
    return f"Do not use this package here: with its defaults no set-up fits into the {limit}, {alone}; {needs}."


def _how(situation: Situation, workload: Workload, wrapper: Wrapper) -> str:
    """The one command or line that answers the question."""
    slowest = "link" if workload.nodes > 1 else "inside"
    if any(each.source == "measured" and each.what == slowest for each in situation.figures):
        return f'strategy="lowbit_{wrapper}" times it in its first steps, and keeps what is faster'
    nodes = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 " if workload.nodes > 1 else ""
    each = " on each of two machines" if workload.nodes > 1 else ""
    return (
        f"`torchrun {nodes}--nproc-per-node {workload.on_a_node} --no-python lowbit bench --out links.json`{each}"
        f" takes {BENCH_MINUTES} minutes and narrows this (then --bench links.json)"
    )


def gain_of(choice: SetupOption, own: Sequence[SetupOption], situation: Situation) -> Gain:
    """The gain over the fastest of the framework's own.

    1. likely: the figures as they are
    2. low: all figures at the ends of their ranges where compression gains least, while the framework overlaps all that
       it can and compression nothing
    3. high: the opposite
    """
    names: list[What] = [each.what for each in situation.figures]
    corners = itertools.product(*((each.best, each.worst) for each in situation.figures))
    found = _gain_at(choice, own, situation)
    gains = [found, *(_gain_at(choice, own, situation.at(dict(zip(names, each, strict=True)))) for each in corners)]
    return Gain(found.likely, min(each.low for each in gains), max(each.high for each in gains))


def _gain_at(choice: SetupOption, own: Sequence[SetupOption], situation: Situation) -> Gain:
    """Where the figures are certain. `own`: the framework's own that fit; none: the gain is infinite."""
    ours, more_steps = situation.coding_as(choice.preset).step(choice.plan), choice.more_steps
    theirs = [situation.step(each.plan) for each in own] or [StepTime(math.inf, math.inf, math.inf)]
    return Gain(
        min(each.seconds for each in theirs) / (more_steps * ours.seconds),
        min(each.low for each in theirs) / (more_steps * ours.high),
        min(each.high for each in theirs) / (more_steps * ours.low),
    )


def break_even(
    ours: Callable[[float], float], other: Callable[[float], float], more_steps: float = 1.0
) -> float | None:
    """The bandwidth in bytes per second below which `ours` is faster than `other` although it needs `more_steps` times
    the steps; None if it never is, `ANY_RATE` if it always is.
    """

    def is_faster(nbytes_per_s: float) -> bool:
        return more_steps * ours(nbytes_per_s) < 0.99 * other(nbytes_per_s)

    low, high = 1e4, ANY_RATE
    if not is_faster(low):
        return None
    for _ in range(11):  # accurate to a hundredth
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return low if low < 0.9 * ANY_RATE else ANY_RATE
