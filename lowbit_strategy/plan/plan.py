"""A plan: everything that a set-up sends in a step and keeps in memory, on one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from lowbit_strategy.collectives.comm import Comm, LocalComm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.plan.extra import Extra
from lowbit_strategy.plan.gradients import (
    Layout,
    ParamGroup,
    ReductionPlan,
    ddp_buckets,
    gradient_transfers,
    part_numel,
)
from lowbit_strategy.plan.messages import (
    TransferGroup,
    ahead_nbytes,
    internode_nbytes,
    step_nbytes,
    under_way_nbytes,
)
from lowbit_strategy.plan.rounds import RoundPlan
from lowbit_strategy.plan.weight_bytes import ModuleLayout, kept_nbytes, weight_transfers
from lowbit_strategy.ranks.ranks import Topology

BUCKETS_OF_A_ROUND = 3  # under way at a time, where ranks are near: one leaves, one arrives, one has its mean


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank keeps in addition to parameters, gradients and the optimizer's state, in bytes, by purpose.

    Args:
        residuals: What methods keep from step to step.
        copies: Copies of residuals before the step.
        weights: What stays of FSDP2's weights between gathers.
        messages: While they are under way, at most.
        working: Temporary, where no kernel codes, and of turns.
        rounds: What is kept from round to round, where ranks meet in rounds.
        extra: What is kept for exchanges in addition to gradients.
        accumulating: Gradients that are held whole while micro-batches are accumulated without synchronizing: under
            FSDP2 a rank otherwise holds its shard of them.
    """

    residuals: int = 0
    copies: int = 0
    weights: int = 0
    messages: int = 0
    working: int = 0
    rounds: int = 0
    extra: int = 0
    accumulating: int = 0

    @property
    def total(self) -> int:
        """Sum of all but `accumulating`, which depends on how the loop accumulates."""
        kept = self.residuals + self.copies + self.weights + self.rounds + self.extra
        return kept + self.messages + self.working


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one rank sends and keeps.

    Args:
        topology: The ranks.
        layout: What wraps the model.
        specs: What this rank reduces of every parameter.
        assignments: Method and kind of each, and why: what is exempt or of high precision.
        gradients: Transfers of every step, in the order in which backward produces them.
        weights: Transfers of every step: FSDP2's modules, in their order.
        rounds: Messages of a round, where ranks meet in rounds.
        extra: Transfers in addition to gradients, per step or round, on average.
        companion: What `extra` is for.
        round_plan: What `rounds` are of; None: every step reduces its gradients.
        memory: Bytes by purpose.
        coding: Coding of weights, if FSDP2 shards them.
        modules: The units that FSDP2 gathers.
    """

    topology: Topology
    layout: Layout
    specs: Mapping[str, TensorSpec]
    assignments: Mapping[str, Assignment]
    gradients: tuple[TransferGroup, ...]
    weights: tuple[TransferGroup, ...]
    rounds: tuple[TransferGroup, ...]
    extra: tuple[TransferGroup, ...]
    companion: Extra
    round_plan: RoundPlan | None
    memory: Memory
    coding: WeightCoding | None
    modules: Mapping[str, ModuleLayout]

    @property
    def scatter(self) -> bool:
        """Whether peers reduce-scatter, and not all-reduce."""
        return self.layout == "fsdp"

    @property
    def every(self) -> int:
        """Optimizer steps of a round; 1 without rounds."""
        return 1 if self.round_plan is None else self.round_plan.every

    @property
    def sent_nbytes(self) -> int:
        """Bytes sent to peers in a step, or in a round; without framing."""
        return step_nbytes((self.rounds or self.gradients) + self.extra, "flat", "inter-node")

    @property
    def between_nbytes(self) -> int:
        """Part of `sent_nbytes` that leaves the node."""
        return internode_nbytes((self.rounds or self.gradients) + self.extra, "flat", "inter-node")

    @property
    def intra_node_nbytes(self) -> int:
        """Bytes of gradients sent inside the node in a step, before and after the exchange between nodes."""
        return step_nbytes(self.gradients, "intra-node")

    @property
    def in_series(self) -> int:
        """Collectives of a step's gradients, or of a round, that wait for each other, the longest bucket's."""
        return max((transfer.in_series for transfer in self.rounds or self.gradients), default=0)

    def uncompressed_nbytes(self, itemsize: int) -> int:
        """Bytes that a ring of elements of `itemsize` bytes would send to the same peers in a step."""
        peers = self.topology.num_peers
        numel = sum(spec.numel for spec in self.specs.values())
        return (1 if self.scatter else 2) * (peers - 1) * numel // peers * itemsize


def make_plan(
    specs: Sequence[TensorSpec],
    assignments: Mapping[str, Assignment],
    topology: Topology,
    layout: Layout,
    *,
    reduced: Sequence[ParamGroup] | None = None,
    coding: WeightCoding | None = None,
    modules: Mapping[str, ModuleLayout] | None = None,
    round_plan: RoundPlan | None = None,
    device_type: str = "cuda",
    extra: Extra | None = None,
    copies: bool | None = None,
) -> StepPlan:
    """Args:
    specs: Parameters, or this rank's parts of them.
    assignments: What each parameter gets (`assign_all`).
    topology: The ranks.
    layout: What wraps the model.
    reduced: What is reduced as one, in the order of backward; None: buckets as DDP's of float32 gradients.
    coding: Coding of weights, under FSDP2.
    modules: What FSDP2 gathers as one, under FSDP2.
    round_plan: What ranks send in rounds, where gradients stay on their rank.
    device_type: Where gradients are coded.
    extra: What ranks exchange in addition to gradients.
    copies: Whether what methods keep is copied before it changes; None: where gradients are reduced.
    """
    by_name = {spec.name: replace(spec, sharded=layout == "fsdp") for spec in specs}
    distinct: dict[Method, Method] = {}  # equal parameters are planned once
    methods = {name: distinct.setdefault(each.method, each.method) for name, each in assignments.items()}
    if reduced is None:
        reduced = ddp_buckets((spec.name, spec.whole_numel, 4) for spec in specs)
    if topology.num_peers == 1:  # there is nobody to meet
        round_plan = None
    exact = frozenset(name for name, each in assignments.items() if each.is_exact)
    reduction = ReductionPlan(methods, by_name, topology, exact)
    gradients = gradient_transfers(reduced, reduction, layout, local=round_plan is not None)
    rounds = () if round_plan is None else round_plan.transfers(methods, by_name, topology)
    companion = Extra() if extra is None else extra
    others = companion.transfers(reduced, assignments, by_name, topology)
    unsharded = sum(each.itemsize * by_name[name].whole_numel for each in reduced for name in each.names)
    waits = layout == "ddp" and any(method.whole_model for method in methods.values())
    max_in_flight = len(gradients) if waits else _max_buckets_in_flight(gradients, topology, layout)
    coded = [tuple(by_name)] if waits else [each.names for each in reduced]
    means = [0] * len(reduced)
    if topology.num_parts > 1:
        means = [each.itemsize * part_numel(by_name, each.names, topology, layout) for each in reduced]
    modules = modules or {}
    weights = () if coding is None else weight_transfers(coding, modules, topology, layout)
    residuals = _residual_nbytes(reduction)
    copies = round_plan is None if copies is None else copies
    return StepPlan(
        topology=topology,
        layout=layout,
        specs=by_name,
        assignments=dict(assignments),
        gradients=gradients,
        weights=weights,
        rounds=rounds,
        extra=others,
        companion=companion,
        round_plan=round_plan,
        memory=Memory(
            residuals=residuals,
            copies=residuals if copies else 0,
            weights=0 if coding is None else kept_nbytes(coding, modules, topology, layout),
            messages=_messages_nbytes(gradients, weights, rounds, others, topology, layout, unsharded, max_in_flight)
            + (_mean_beside_nbytes(gradients, means) if layout == "fsdp" and device_type == "cuda" else 0),
            working=reduction.working_nbytes(coded, device_type)
            + (0 if round_plan is None else round_plan.working_nbytes(by_name)),
            rounds=0 if round_plan is None else round_plan.kept_nbytes(by_name),
            extra=companion.kept_nbytes(assignments, by_name, topology, copies=copies),
            accumulating=0 if layout == "ddp" else unsharded,
        ),
        coding=coding,
        modules=modules,
    )


def _max_buckets_in_flight(gradients: Sequence[TransferGroup], topology: Topology, layout: Layout) -> int:
    """Buckets in flight at most, where no method waits for the whole model.

    DDP's are sent while backward goes on. Each bucket that starts takes those before it one exchange further, so near
    ranks have as many under way as one has exchanges, and one more; in the first step, which has other buckets, what
    is left over may exist at the same time. Far ranks have all of them under way.
    """
    if topology.far:
        return len(gradients)
    return 2 + max((transfer.in_series for transfer in gradients), default=0) if layout == "ddp" else 1


def _messages_nbytes(
    gradients: Sequence[TransferGroup],
    weights: Sequence[TransferGroup],
    rounds: Sequence[TransferGroup],
    extra: Sequence[TransferGroup],
    topology: Topology,
    layout: Layout,
    unsharded: int,
    max_in_flight: int,
) -> int:
    """Peak memory of messages. `unsharded`: bytes of the whole gradients; `max_in_flight`: buckets in flight."""
    nbytes = under_way_nbytes(gradients, max_in_flight)
    nbytes += under_way_nbytes(rounds, len(rounds) if topology.far else BUCKETS_OF_A_ROUND)
    nbytes += under_way_nbytes(weights, len(weights) if layout == "fsdp" and topology.far else 1)
    nbytes += under_way_nbytes(extra, 1)
    if topology.far:
        nbytes += sum(ahead_nbytes(transfer) for transfer in (*gradients, *rounds, *weights, *extra))
    if layout == "fsdp" and topology.far:  # until backward has ended FSDP2's gradients, on one level, and all sums
        nbytes += unsharded // topology.world_size + (unsharded if topology.node_size is None else 0)
    return nbytes


def _mean_beside_nbytes(gradients: Sequence[TransferGroup], means: Sequence[int]) -> int:
    """Memory of a second mean under FSDP2 with two levels on GPUs: one travels while the next is formed."""
    buffers = [each.buffer_nbytes for each in gradients]
    overlapping = [buffer + mean for buffer, mean in zip(buffers, means[1:], strict=False)]
    return max([*buffers, *overlapping], default=0) - max(buffers, default=0)


def _residual_nbytes(reduction: ReductionPlan) -> int:
    """Memory for what methods keep, as their stores have it: made on the meta device, they take none."""
    comm = LocalComm(reduction.topology.num_peers)
    served: dict[Method, dict[str, TensorSpec]] = {}
    for name, method in reduction.methods.items():
        served.setdefault(method, {})[name] = reduction.specs[name]
    return sum(_store_nbytes(method, members, comm) for method, members in served.items())


def _store_nbytes(method: Method, specs: Mapping[str, TensorSpec], comm: Comm) -> int:
    meta = torch.device("meta")
    if method.whole_model:
        return method.make_store(specs, comm, meta).nbytes
    alike: dict[object, list[TensorSpec]] = {}
    for spec in specs.values():
        alike.setdefault((spec.shape, spec.ranges), []).append(spec)
    return sum(
        len(members) * method.make_store({members[0].name: members[0]}, comm, meta).nbytes for members in alike.values()
    )
