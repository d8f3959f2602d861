"""What is trained and where, and its plans: a strategy's, and the framework's own without compression."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowbit_strategy.advisor.cost import Ring, ranks_per_node
from lowbit_strategy.attach.prepare import Layout
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.hooks.ddp import BUCKET_CAP_MB
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all, assignment_for_part
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding, default_weights
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.messages import Level, TransferGroup
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.reduced import ParamGroup, ddp_buckets
from lowbit_strategy.plan.round_plan import RoundPlan
from lowbit_strategy.ranks.ranks import Topology

_VOCABULARY = 32_000
_HEAD = 128  # of attention: the width is a multiple of it, and a layer deep per head
_PER_LAYER = 12  # matrices of width x width: four of attention, eight of the feed-forward part
_LATE = 10**6  # a step at which all warm-ups are over
HELD_PER_PARAM = 16  # bytes: weight, gradient and two moments in float32; so it is with bf16-mixed
PRECISIONS = {  # as Lightning calls them: itemsize and held_per_param of a workload
    "32": (4, HELD_PER_PARAM),
    "bf16-mixed": (2, HELD_PER_PARAM),
    "bf16-true": (2, 8),  # AdamW's moments have the type of the weights
}


def transformer(num_params: float) -> list[TensorSpec]:
    """A decoder of about `num_params` parameters: as deep as it has heads of 128, embedding and head not tied.

    Raises:
        ValueError: Fewer than a model of one head would have.
    """
    width = _HEAD
    while _numel(width + _HEAD) <= num_params:
        width += _HEAD
    if _numel(width) > 4 * num_params:
        raise ValueError(f"{num_params:g} parameters are fewer than a transformer of one head has: give a model")
    layers = max(1, round((num_params - 2 * _VOCABULARY * width) / (_PER_LAYER * width * width)))
    specs = [TensorSpec("embedding.weight", (_VOCABULARY, width), role="embedding")]
    for layer in range(layers):
        prefix = f"layers.{layer}"
        specs += [TensorSpec(f"{prefix}.attention.{name}.weight", (width, width)) for name in ("q", "k", "v", "o")]
        specs.append(TensorSpec(f"{prefix}.mlp.up.weight", (4 * width, width)))
        specs.append(TensorSpec(f"{prefix}.mlp.down.weight", (width, 4 * width)))
        specs += [TensorSpec(f"{prefix}.{name}.weight", (width,)) for name in ("norm1", "norm2")]
    return [*specs, TensorSpec("norm.weight", (width,)), TensorSpec("head.weight", (_VOCABULARY, width), role="head")]


def _numel(width: int) -> int:
    return _PER_LAYER * width**3 // _HEAD + 2 * _VOCABULARY * width


def layers_of(specs: Iterable[TensorSpec], itemsize: int) -> dict[str, ModuleLayout]:
    """What is usually sharded together: parameters whose names have the first number in common, and the rest."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    modules: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts = spec.name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        modules.setdefault("root" if at is None else ".".join(parts[: at + 1]), []).append(spec)
    return {  # FSDP2 keeps the outermost module's weights from forward to backward
        name: ModuleLayout(specs=tuple(members), dtype=dtype, num_gathers=1 if name == "root" else 2)
        for name, members in modules.items()
    }


@dataclass(frozen=True, eq=False)
class Workload:
    """The model to train, and the ranks that train it.

    Args:
        specs: Parameters, or a rank's parts of them with tensor parallelism.
        nodes: Machines.
        ranks_per_node: Processes on each, over which gradients are a mean.
        itemsize: Bytes of an element of weights and gradients as they travel without compression: 2 for bf16, 4 for
            float32. What compression is compared with.
        held_per_param: Bytes that a rank holds per parameter: weight, gradient and the two moments of Adam.
        device_type: Device type of the ranks.
        far: Whether messages between machines take so long that all are to travel at once, as they do on CPU.
        tensor_parallel: Ranks of a node that have a part of every matrix each. Their messages share the node's link.
    """

    specs: Sequence[TensorSpec]
    nodes: int
    ranks_per_node: int
    itemsize: int = 4
    held_per_param: int = HELD_PER_PARAM
    device_type: str = "cuda"
    far: bool = False
    tensor_parallel: int = 1

    @classmethod
    def in_parts(
        cls, num_parts: int, specs: Sequence[TensorSpec], nodes: int, num_ranks: int, itemsize: int, held: int
    ) -> Workload:
        """The workload under tensor parallelism over `num_parts` of a node's `num_ranks`: matrices have as many parts.

        Raises:
            ValueError: `num_parts` does not divide `num_ranks`.
        """
        if num_ranks % num_parts:
            raise ValueError(
                f"--tensor-parallel {num_parts} does not divide the {num_ranks} ranks of a node: parts of a model are"
                " exchanged in every layer, and belong on one machine"
            )
        parts = [
            spec if spec.ndim < 2 else replace(spec, shape=(-(-spec.shape[0] // num_parts), *spec.shape[1:]))
            for spec in specs
        ]
        return cls(parts, nodes, num_ranks // num_parts, itemsize, held, tensor_parallel=num_parts)

    @property
    def on_a_node(self) -> int:
        """All processes on a machine."""
        return self.ranks_per_node * self.tensor_parallel

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def baseline(self) -> str:
        """The uncompressed baseline."""
        return {2: "bf16", 4: "float32"}[self.itemsize]

    @functools.cached_property
    def numel(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @functools.cached_property
    def modules(self) -> dict[str, ModuleLayout]:
        """Modules that FSDP2 shards one by one."""
        return layers_of(self.specs, self.itemsize)

    @functools.lru_cache(maxsize=4)  # noqa: B019 (of one model)
    def parts(self, topology: Topology, layout: Layout) -> list[TensorSpec]:
        """What the first rank reduces of each parameter."""
        return topology.own_parts(self.specs, sharded=layout == "fsdp")


def plan_for(
    workload: Workload,
    layout: Layout,
    compressor: Compressor,
    *,
    round_plan: RoundPlan | None = None,
    assigned: Mapping[str, Assignment] | None = None,
    extra: Extra | None = None,
) -> StepPlan:
    """A strategy's plan with its defaults: two levels where nodes have several ranks, HSDP with a replica per node."""
    assigned = assign(workload, compressor) if assigned is None else assigned
    topology = topology_for(workload, layout, local=round_plan is not None)
    parts, modules = workload.parts(topology, layout), workload.modules
    coding: WeightCoding | None = None
    if layout == "ddp":
        cap_nbytes = BUCKET_CAP_MB[workload.device_type] * 2**20
        reduced = ddp_buckets(((spec.name, spec.numel, workload.itemsize) for spec in workload.specs), cap_nbytes)
    else:
        coding = Exact() if layout == "hsdp" else default_weights(compressor)
        members = [(name, module.specs) for name, module in reversed(modules.items())]
        reduced = [ParamGroup(tuple(spec.name for spec in specs), workload.itemsize, name) for name, specs in members]
    return make_plan(
        parts,
        {part.name: assignment_for_part(assigned[part.name], part) for part in parts},
        topology,
        layout,
        reduced=reduced,
        coding=coding,
        modules=None if layout == "ddp" else modules,
        round_plan=round_plan,
        device_type=workload.device_type,
        extra=extra,
    )


def topology_for(workload: Workload, layout: Layout, *, local: bool = False) -> Topology:
    """The first rank's place; `local`: steps are."""
    nodes, per_node = workload.nodes, workload.ranks_per_node
    two_level = per_node > 1 and (layout == "hsdp" or (nodes > 1 and not local))
    far = workload.far and nodes > 1
    return Topology(workload.world_size, (per_node,) * nodes, node_size=per_node if two_level else None, far=far)


def assign(workload: Workload, compressor: Compressor) -> Mapping[str, Assignment]:
    """What each whole parameter gets once all warm-ups are over."""
    late = compressor.phase(_LATE)
    late.check(workload.specs)
    return assign_all(late, workload.specs)


def ring_of(nbytes: float, plan: StepPlan, *, hops: int, scattered: bool = False) -> Ring:
    """A ring over `nbytes`, by one hop or two (all-reduce): every link between nodes carries it once a hop.

    A rank waits for a message per other node in each hop; those inside nodes cost less and are left out. An all-reduce
    may go up a tree of the nodes and down again, with the same bytes.
    """
    world_size, per_node = plan.topology.world_size, ranks_per_node(plan)
    sent = hops * (world_size - 1) * nbytes / world_size
    nodes = -(-world_size // per_node)
    level: Level = "flat" if nodes > 1 else "intra-node"
    internode_fraction = 1 / per_node if nodes > 1 else 0.0
    in_series = hops * max(1, nodes - 1)
    tree_steps = min(in_series, 2 * math.ceil(math.log2(nodes))) if hops == 2 and nodes > 1 else None
    return Ring(
        level,
        "ring",
        round(sent),
        in_series=in_series,
        internode_fraction=internode_fraction,
        scattered=scattered,
        tree_steps=tree_steps,
    )


def uncompressed(plan: StepPlan, itemsize: int, weights_itemsize: int | None = None) -> StepPlan:
    """What the framework sends by itself for the same model on the same ranks.

    Args:
        plan: The plan with compression.
        itemsize: Bytes of an element of the gradients.
        weights_itemsize: Bytes of an element of FSDP2's weights, where they travel in another type than the plan's.
    """
    own = replace(plan, rounds=(), extra=(), round_plan=None)
    if plan.topology.world_size == 1:
        silent = [
            tuple(replace(transfer, messages=(), encoded_numel=0) for transfer in transfers)
            for transfers in (plan.gradients, plan.weights)
        ]
        return replace(own, gradients=silent[0], weights=silent[1])
    scattered = plan.layout == "fsdp"
    hops = 1 if scattered else 2
    # HSDP: inside the node as before, between nodes a ring of shards: as bytes per node a ring of everything
    sizes = _reduced_as_one(plan, itemsize)
    rings = {numel: (ring_of(numel * itemsize, plan, hops=hops, scattered=scattered),) for _, numel in sizes}
    weights = []
    for transfer in plan.weights:
        module, messages = plan.modules[transfer.name], transfer.messages
        if plan.layout != "hsdp":
            messages = (ring_of(transfer.numel * (weights_itemsize or module.dtype.itemsize), plan, hops=1),)
        weights.append(replace(transfer, messages=messages, repeats=module.num_gathers, encoded_numel=0))
    return replace(
        own,
        topology=replace(plan.topology, far=False),  # it posts no receives ahead
        gradients=tuple(TransferGroup(name, numel, rings[numel]) for name, numel in sizes),
        weights=tuple(weights),
    )


def _reduced_as_one(plan: StepPlan, itemsize: int) -> list[tuple[str, int]]:
    """Names and elements: modules as before, and DDP's buckets, which are of other sizes than those it compresses."""
    if plan.layout != "ddp":
        return [(transfer.name, transfer.numel) for transfer in plan.gradients or plan.rounds]
    numels = {name: spec.whole_numel for name, spec in plan.specs.items()}
    buckets = ddp_buckets((name, numel, itemsize) for name, numel in numels.items())
    return [(bucket.name, sum(numels[name] for name in bucket.names)) for bucket in buckets]
