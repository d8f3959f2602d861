"""A plan: everything that one rank sends in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.gradients import ReductionPlan, gradient_transfers
from lowbit_strategy.plan.messages import TransferGroup, internode_nbytes, step_nbytes
from lowbit_strategy.plan.reduced import ParamGroup, ddp_buckets
from lowbit_strategy.plan.round_plan import RoundPlan
from lowbit_strategy.plan.weight_bytes import weight_transfers
from lowbit_strategy.ranks.topology import Topology


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One rank's messages, and everything that determines its bytes and memory.

    Args:
        topology: The ranks.
        wrapper: The model's wrapper.
        specs: The part of every parameter that this rank reduces.
        assignments: Method and kind of each parameter, with reasons: compressed, high-precision or exempt.
        reduced: Parameters that are reduced together, in the order of backward.
        gradients: Transfers of every step, for each of `reduced`.
        weights: Transfers of every step: FSDP2's modules, in their order.
        rounds: Messages of a round, if ranks meet in rounds.
        extra: Transfers in addition to gradients, per step or round, on average.
        companion: The purpose of `extra`.
        round_plan: The plan of a round; None: every step reduces its gradients.
        coding: Coding of weights, if FSDP2 shards them.
        modules: The units that FSDP2 gathers.
        device_type: Type of the device on which gradients are coded.
        copies: Whether methods' state is copied before it changes.
    """

    topology: Topology
    wrapper: Wrapper
    specs: Mapping[str, TensorSpec]
    assignments: Mapping[str, Assignment]
    reduced: tuple[ParamGroup, ...]
    gradients: tuple[TransferGroup, ...]
    weights: tuple[TransferGroup, ...]
    rounds: tuple[TransferGroup, ...]
    extra: tuple[TransferGroup, ...]
    companion: Extra
    round_plan: RoundPlan | None
    coding: WeightCoding | None
    modules: Mapping[str, ModuleLayout]
    device_type: str
    copies: bool

    @property
    def reduction(self) -> ReductionPlan:
        """The ranks and methods that reduce parameters."""
        return _reduction(self.assignments, self.specs, self.topology)

    @property
    def sharded(self) -> bool:
        """Whether peers do a reduce-scatter instead of an all-reduce."""
        return self.wrapper == "fsdp"

    @property
    def every(self) -> int:
        """Optimizer steps of a round; 1 without rounds."""
        return 1 if self.round_plan is None else self.round_plan.every

    @property
    def sent_nbytes(self) -> int:
        """Bytes sent to peers in a step or round, without framing."""
        return step_nbytes((self.rounds or self.gradients) + self.extra, "flat", "inter-node")

    @property
    def between_nbytes(self) -> int:
        """Part of `sent_nbytes` that leaves the node."""
        return internode_nbytes((self.rounds or self.gradients) + self.extra, "flat", "inter-node")

    @property
    def intra_node_nbytes(self) -> int:
        """Gradient bytes sent inside the node in a step, before and after the exchange between nodes."""
        return step_nbytes(self.gradients, "intra-node")

    @property
    def in_series(self) -> int:
        """Number of consecutive collectives in the longest bucket of a step or round."""
        return max((transfer.in_series for transfer in self.rounds or self.gradients), default=0)

    def uncompressed_nbytes(self, itemsize: int) -> int:
        """Bytes that a ring of elements of `itemsize` bytes would send to the same peers in a step."""
        peers = self.topology.num_peers
        numel = sum(spec.numel for spec in self.specs.values())
        return (1 if self.sharded else 2) * (peers - 1) * numel // peers * itemsize


def make_plan(
    specs: Sequence[TensorSpec],
    assignments: Mapping[str, Assignment],
    topology: Topology,
    wrapper: Wrapper,
    *,
    reduced: Sequence[ParamGroup] | None = None,
    coding: WeightCoding | None = None,
    modules: Mapping[str, ModuleLayout] | None = None,
    round_plan: RoundPlan | None = None,
    device_type: str = "cuda",
    extra: Extra | None = None,
    copies: bool | None = None,
) -> StepPlan:
    """Make the plan of a step.

    Args:
        specs: Parameters, or this rank's parts of them.
        assignments: The assignment of each parameter (`assign_all`).
        topology: The ranks.
        wrapper: The model's wrapper.
        reduced: Parameters that are reduced together, in the order of backward; None: buckets like DDP's for float32
            gradients.
        coding: Coding of weights, under FSDP2.
        modules: The units that FSDP2 gathers.
        round_plan: The plan of a round, if gradients stay on their rank.
        device_type: Type of the device on which gradients are coded.
        extra: Exchanges in addition to gradients.
        copies: Whether methods' state is copied before it changes; None: if gradients are reduced.
    """
    by_name = {spec.name: replace(spec, sharded=wrapper == "fsdp") for spec in specs}
    if reduced is None:
        reduced = ddp_buckets((spec.name, spec.whole_numel, 4) for spec in specs)
    if topology.num_peers == 1:  # no peers to meet
        round_plan = None
    reduction = _reduction(assignments, by_name, topology)
    companion, modules = extra or Extra(), modules or {}
    return StepPlan(
        topology=topology,
        wrapper=wrapper,
        specs=by_name,
        assignments=dict(assignments),
        reduced=tuple(reduced),
        gradients=gradient_transfers(reduced, reduction, wrapper, local=round_plan is not None),
        weights=() if coding is None else weight_transfers(coding, modules, topology, wrapper),
        rounds=() if round_plan is None else round_plan.transfers(reduction.methods, by_name, topology),
        extra=companion.transfers(reduced, assignments, by_name, topology),
        companion=companion,
        round_plan=round_plan,
        coding=coding,
        modules=modules,
        device_type=device_type,
        copies=round_plan is None if copies is None else copies,
    )


def _reduction(
    assignments: Mapping[str, Assignment], specs: Mapping[str, TensorSpec], topology: Topology
) -> ReductionPlan:
    distinct: dict[Method, Method] = {}  # equal parameters are planned once
    methods = {name: distinct.setdefault(each.method, each.method) for name, each in assignments.items()}
    exact = frozenset(name for name, each in assignments.items() if each.is_exact)
    return ReductionPlan(methods, specs, topology, exact)
