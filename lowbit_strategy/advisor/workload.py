"""The model and ranks, and a strategy's plan for them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.hooks.bucket_cap import BUCKET_CAP_MB
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all, assignment_for_part
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding, default_weights
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.reduced import ParamGroup, ddp_buckets
from lowbit_strategy.plan.round_plan import RoundPlan
from lowbit_strategy.ranks.topology import Topology

_LATE = 10**6  # a step at which all warm-ups are over
HELD_PER_PARAM = 16  # bytes: weight, gradient and two moments in float32; so it is with bf16-mixed
PRECISIONS = {  # as Lightning calls them: itemsize and held_per_param of a workload
    "32": (4, HELD_PER_PARAM),
    "bf16-mixed": (2, HELD_PER_PARAM),
    "bf16-true": (2, 8),  # AdamW's moments have the type of the weights
}


def layers_of(specs: Iterable[TensorSpec], itemsize: int) -> dict[str, ModuleLayout]:
    """Parameters that are usually sharded together: those whose names share the first number, and the rest."""
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
    def parts(self, topology: Topology, wrapper: Wrapper) -> list[TensorSpec]:
        """The part of each parameter that the first rank reduces."""
        return topology.own_parts(self.specs, sharded=wrapper == "fsdp")


def plan_for(
    workload: Workload,
    wrapper: Wrapper,
    compressor: Compressor,
    *,
    round_plan: RoundPlan | None = None,
    assigned: Mapping[str, Assignment] | None = None,
    extra: Extra | None = None,
) -> StepPlan:
    """A strategy's plan with its defaults: two levels where nodes have several ranks, HSDP with a replica per node."""
    assigned = assign(workload, compressor) if assigned is None else assigned
    topology = topology_for(workload, wrapper, local=round_plan is not None)
    parts, modules = workload.parts(topology, wrapper), workload.modules
    coding: WeightCoding | None = None
    if wrapper == "ddp":
        cap_nbytes = BUCKET_CAP_MB[workload.device_type] * 2**20
        reduced = ddp_buckets(((spec.name, spec.numel, workload.itemsize) for spec in workload.specs), cap_nbytes)
    else:
        coding = Exact() if wrapper == "hsdp" else default_weights(compressor)
        members = [(name, module.specs) for name, module in reversed(modules.items())]
        reduced = [ParamGroup(tuple(spec.name for spec in specs), workload.itemsize, name) for name, specs in members]
    return make_plan(
        parts,
        {part.name: assignment_for_part(assigned[part.name], part) for part in parts},
        topology,
        wrapper,
        reduced=reduced,
        coding=coding,
        modules=None if wrapper == "ddp" else modules,
        round_plan=round_plan,
        device_type=workload.device_type,
        extra=extra,
    )


def topology_for(workload: Workload, wrapper: Wrapper, *, local: bool = False) -> Topology:
    """The first rank's place; `local`: steps are."""
    nodes, per_node = workload.nodes, workload.ranks_per_node
    two_level = per_node > 1 and (wrapper == "hsdp" or (nodes > 1 and not local))
    far = workload.far and nodes > 1
    return Topology(workload.world_size, (per_node,) * nodes, node_size=per_node if two_level else None, far=far)


def assign(workload: Workload, compressor: Compressor) -> Mapping[str, Assignment]:
    """The assignment of each whole parameter after all warm-ups."""
    late = compressor.phase(_LATE)
    late.check(workload.specs)
    return assign_all(late, workload.specs)
