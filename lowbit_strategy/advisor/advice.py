"""Which set-up suits a model and its links: every sensible one planned, its step predicted, and compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lowbit_strategy.advisor.cost import StepTime, break_even, over_bandwidth
from lowbit_strategy.advisor.inputs import Situation
from lowbit_strategy.advisor.measured_loss import STEPS, Loss, MoreSteps, Quality, quality_of, steps_of, worst_loss
from lowbit_strategy.advisor.models import layers_of
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.collectives.layout import Share
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all, assignment_for_part
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.outer.registry import OUTER_RULES, default_compressor
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.weights import Exact, WeightCoding, default_weights
from lowbit_strategy.plan import fitting
from lowbit_strategy.plan.gradients import BUCKET_CAP_MB, Layout, ParamGroup, ddp_buckets
from lowbit_strategy.plan.messages import TransferGroup
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.weights import ModuleLayout
from lowbit_strategy.ranks.ranks import Shape
from lowbit_strategy.ranks.topology import Topology

_LATE = 10**6  # a step at which all warm-ups are over
BITS = {"loco": 4, "loco2": 2, "loco1": 1, "powersgd": 1}  # of what is shown; of PowerSGD fewer than that
_COMPRESSED = tuple((name, quality_of(name, bits)) for name, bits in BITS.items())
_SQUARES = "*"  # after the name of what has second_moment=True
_SQUARES_LINES = {
    "ddp": 'strategy=LowBitDDPStrategy("{}", second_moment=True)',
    "fsdp": 'strategy=LowBitFSDPStrategy("{}", second_moment=True)',
    "hsdp": 'strategy=LowBitFSDPStrategy("{}", shard_size="node", second_moment=True)',
}


@dataclass(frozen=True, eq=False)
class Workload:
    """What is to be trained, and where.

    Args:
        specs: Parameters.
        nodes: Machines.
        ranks_per_node: Processes on each.
        itemsize: Bytes of an element of weights and gradients without compression: 2 for bf16, 4 for float32.
        device_type: Of the ranks.
        far: Whether messages between machines take so long that all are to travel at once, as they do on CPU.
    """

    specs: Sequence[TensorSpec]
    nodes: int
    ranks_per_node: int
    itemsize: int = 4
    device_type: str = "cuda"
    far: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @functools.cached_property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @functools.cached_property
    def modules(self) -> dict[str, ModuleLayout]:
        """As FSDP2 is given them."""
        return layers_of(self.specs, self.itemsize)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (of one model)
    def parts(self, share: Share | None) -> list[TensorSpec]:
        """What the first rank reduces of each parameter."""
        return [spec.shared(share) for spec in self.specs]


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


def plan_for(
    workload: Workload,
    layout: Layout,
    compressor: Compressor,
    *,
    coding: WeightCoding | None = None,
    outer: OuterRule | None = None,
    assigned: Mapping[str, Assignment] | None = None,
    squares: bool = False,
) -> StepPlan:
    """A strategy's plan with its defaults: two levels where nodes have several ranks, HSDP with a replica per node."""
    assigned = assign(workload, compressor) if assigned is None else assigned
    shape = shape_for(workload, layout, local=outer is not None)
    parts, modules = workload.parts(shape.share), workload.modules
    if layout == "ddp":
        coding = None
        cap_nbytes = BUCKET_CAP_MB[workload.device_type] * 2**20
        reduced = ddp_buckets(((spec.name, spec.numel, workload.itemsize) for spec in workload.specs), cap_nbytes)
    else:
        coding = coding or (Exact() if layout == "hsdp" else default_weights(compressor))
        members = [(name, module.specs) for name, module in reversed(modules.items())]
        reduced = [ParamGroup(tuple(spec.name for spec in specs), workload.itemsize, name) for name, specs in members]
    return make_plan(
        parts,
        {part.name: assignment_for_part(assigned[part.name], part) for part in parts},
        shape,
        layout,
        reduced=reduced,
        coding=coding,
        modules=None if layout == "ddp" else modules,
        outer=outer,
        device_type=workload.device_type,
        squares=squares,
    )


def shape_for(workload: Workload, layout: Layout, *, local: bool = False) -> Shape:
    """The first rank's place; `local`: steps are."""
    nodes, per_node = workload.nodes, workload.ranks_per_node
    two_level = per_node > 1 and (layout == "hsdp" or (nodes > 1 and not local))
    share = Share(0, per_node, nodes if layout == "fsdp" else None) if two_level else None
    far = workload.far and nodes > 1
    return Shape(workload.world_size, 0, share, Topology((per_node,) * nodes, workload.world_size), far)


def kept(workload: Workload) -> list[fitting.MemoryOption]:
    """What ``loco_fsdp`` may keep, from its defaults down to what `memory=` can bring it to."""
    compressor = PRESETS["loco"]
    setup = fitting.Setup(
        specs=workload.specs,
        shape=shape_for(workload, "fsdp"),
        layout="fsdp",
        modules=workload.modules,
    )
    coding = default_weights(compressor)
    return list(fitting.memory_options(compressor, coding, setup, may_recode=True))


def assign(workload: Workload, compressor: Compressor) -> Mapping[str, Assignment]:
    """What each whole parameter gets once all warm-ups are over."""
    late = compressor.phase(_LATE)
    late.check(workload.specs)
    return assign_all(late, workload.specs)


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
            plan = plan_for(workload, layout, default_compressor(rule), outer=rule)
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
