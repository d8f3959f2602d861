"""Computes the memory that a plan needs on one rank, in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from lowbit_strategy.codecs.packed import PART_NUMEL
from lowbit_strategy.collectives.comm import Comm, LocalComm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Assignment
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.gradients import ReductionPlan, node_rows
from lowbit_strategy.plan.messages import EXACT_WEIGHTS, TransferGroup
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.plan.weight_bytes import kept_nbytes

BUCKETS_OF_A_ROUND = 3  # in flight at a time between near ranks: one leaves, one arrives, one has its mean
_WORKING_NBYTES = 32  # temporary bytes per element that plain PyTorch codes at a time, measured: benchmarks/LOG.md


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a rank in addition to parameters, gradients and the optimizer's state, in bytes, by purpose.

    Args:
        residuals: State that methods keep from step to step.
        copies: Copies of residuals before the step.
        weights: FSDP2's weights that are kept between gathers.
        messages: Peak memory of messages in flight.
        working: Temporary memory for coding without kernels, and in turns.
        rounds: State kept from round to round, if ranks meet in rounds.
        extra: State kept for exchanges in addition to gradients.
        accumulating: Whole gradients that are kept while micro-batches are accumulated without synchronizing; otherwise
            a rank holds only its shard under FSDP2.
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
    def temporary(self) -> int:
        """Peak memory of messages, and of coding them without kernels, on this rank."""
        return self.messages + self.working

    @property
    def total(self) -> int:
        """Sum of all but `accumulating`, which depends on how the loop accumulates."""
        return self.residuals + self.copies + self.weights + self.rounds + self.extra + self.temporary


def memory_of(plan: StepPlan) -> Memory:
    """The memory of one rank."""
    reduction, rounds, specs = plan.reduction, plan.round_plan, plan.specs
    residuals = _residual_nbytes(reduction)
    unsharded = sum(each.itemsize * specs[name].whole_numel for each in plan.reduced for name in each.names)
    waits = plan.wrapper == "ddp" and any(method.whole_model for method in reduction.methods.values())
    coded = [tuple(specs)] if waits else [each.names for each in plan.reduced]
    max_in_flight = len(plan.gradients) if waits else _max_buckets_in_flight(plan)
    return Memory(
        residuals=residuals,
        copies=residuals if plan.copies else 0,
        weights=0 if plan.coding is None else kept_nbytes(plan.coding, plan.modules, plan.topology, plan.wrapper),
        messages=_messages_nbytes(plan, unsharded, max_in_flight) + _second_mean_nbytes(plan),
        working=_working_nbytes(reduction, coded, plan.device_type)
        + (0 if rounds is None else rounds.working_nbytes(specs)),
        rounds=0 if rounds is None else rounds.kept_nbytes(specs),
        extra=plan.companion.kept_nbytes(plan.assignments, specs, plan.topology, copies=plan.copies),
        accumulating=0 if plan.wrapper == "ddp" else unsharded,
    )


def kept_nbytes_of(sync: GradientSync, assignments: Mapping[str, Assignment], coding: WeightCoding | None) -> int:
    """The memory that this rank would need with these methods and this coding of weights."""
    return sum(memory_of(plan_of(sync, assignments, coding, ranks=ranks)).total for ranks in sync.all_ranks)


def lines(plan: StepPlan) -> list[str]:
    """Lines of the start-up report."""
    memory, rounds = memory_of(plan), plan.round_plan
    copies = f" {size(memory.copies)} for copies of them," if memory.copies else ""
    return [
        *([] if rounds is None else [f"  memory per rank: {size(memory.rounds)} for {rounds.keeps}"]),
        f"  memory per rank: {size(memory.residuals)} for residuals,{copies}"
        f" at most {size(memory.temporary)} for messages",
    ]


# -- messages ---------------------------------------------------------------------------------------------------------


def _max_buckets_in_flight(plan: StepPlan) -> int:
    """The most buckets in flight, if no method waits for the whole model.

    DDP's buckets are sent while backward continues. Each new bucket advances the earlier ones by one exchange, so near
    ranks have one more bucket under way than a bucket has exchanges. In the first step, which has different buckets,
    leftovers may exist at the same time. Far ranks have all buckets under way.
    """
    if plan.topology.far:
        return len(plan.gradients)
    return 2 + max((transfer.in_series for transfer in plan.gradients), default=0) if plan.wrapper == "ddp" else 1


def _messages_nbytes(plan: StepPlan, unsharded: int, max_in_flight: int) -> int:
    """Peak memory of messages. `unsharded`: bytes of the whole gradients; `max_in_flight`: buckets in flight."""
    topology, is_sharded = plan.topology, plan.wrapper == "fsdp"
    nbytes = _under_way_nbytes(plan.gradients, max_in_flight)
    nbytes += _under_way_nbytes(plan.rounds, len(plan.rounds) if topology.far else BUCKETS_OF_A_ROUND)
    nbytes += _under_way_nbytes(plan.weights, len(plan.weights) if is_sharded and topology.far else 1)
    nbytes += _under_way_nbytes(plan.extra, 1)
    if topology.far:
        everything = (*plan.gradients, *plan.rounds, *plan.weights, *plan.extra)
        nbytes += sum(_ahead_nbytes(transfer) for transfer in everything)
    if is_sharded and topology.far:  # FSDP2's gradients, on one level, and all sums until backward has ended
        nbytes += unsharded // topology.world_size + (unsharded if topology.node_size is None else 0)
    return nbytes


def _under_way_nbytes(transfers: Sequence[TransferGroup], max_in_flight: int) -> int:
    """Peak buffer memory with at most `max_in_flight` transfers in flight."""
    traveling = [
        sum(transfer.buffer_nbytes for transfer in transfers[first : first + max_in_flight])
        for first in range(len(transfers))
    ]
    return max(traveling, default=0) + max((transfer.brief_nbytes for transfer in transfers), default=0)


def _ahead_nbytes(transfer: TransferGroup) -> int:
    """Memory for receives that are posted ahead if peers are far apart: as much as is sent to them."""
    own = (message for message in transfer.messages if message.level != "intra-node" and message.what != EXACT_WEIGHTS)
    return sum(message.total_nbytes for message in own)


def _second_mean_nbytes(plan: StepPlan) -> int:
    """Memory for a second mean under FSDP2 with two levels on GPUs, where one travels while the next is computed."""
    if plan.wrapper != "fsdp" or plan.device_type != "cuda" or plan.topology.num_parts == 1:
        return 0
    rows = {name: math.prod(node_rows(spec, plan.topology, plan.wrapper)) for name, spec in plan.specs.items()}
    means = [each.itemsize * sum(rows[name] for name in each.names) for each in plan.reduced]
    buffers = [each.buffer_nbytes for each in plan.gradients]
    overlapping = [buffer + mean for buffer, mean in zip(buffers, means[1:], strict=False)]
    return max([*buffers, *overlapping], default=0) - max(buffers, default=0)


# -- coding -----------------------------------------------------------------------------------------------------------


def _working_nbytes(reduction: ReductionPlan, coded: Iterable[Sequence[str]], device_type: str) -> int:
    """Temporary memory for coding without kernels.

    Codecs: plain PyTorch codes a run of elements at a time. A `Reducer`: what it needs for the elements that it
    reduces at once.

    Args:
        reduction: The ranks and methods.
        coded: Names of the parameters that are reduced at a time.
        device_type: Where gradients are coded.
    """
    run = PART_NUMEL[device_type == "cuda"]
    longest = 0
    for pair, row_numel in reduction.coded_rows(reduction.methods):
        if not (pair.uplink.in_one_pass and (reduction.is_sharded or pair.downlink.in_one_pass)):
            longest = max(longest, row_numel, min(run, reduction.topology.num_peers * row_numel))
    reducing = (round(_reducing_nbytes(reduction, names)) for names in coded)
    return longest * _WORKING_NBYTES + max(reducing, default=0)


def _reducing_nbytes(reduction: ReductionPlan, names: Sequence[str]) -> float:
    copied = 4 if reduction.is_sharded else 0  # rows of several ranks are put together first
    return max(
        (
            sum((method.temporary_nbytes + copied) * spec.numel for spec in members)
            for method, members in reduction.reduced(names).items()
            if method.temporary_nbytes
        ),
        default=0.0,
    )


# -- residuals --------------------------------------------------------------------------------------------------------


def _residual_nbytes(reduction: ReductionPlan) -> int:
    """Memory for methods' state, found by making their stores on the meta device."""
    comm = LocalComm(reduction.topology.num_peers)
    served: dict[Method, dict[str, TensorSpec]] = {}
    for name, method in reduction.methods.items():
        served.setdefault(method, {})[name] = reduction.specs[name]
    return sum(_store_nbytes(method, members, comm) for method, members in served.items())


def _store_nbytes(method: Method, specs: Mapping[str, TensorSpec], comm: Comm) -> int:
    meta = torch.device("meta")
    if method.whole_model:
        return method.make_store(specs, comm, meta).nbytes
    equal: dict[object, list[TensorSpec]] = {}
    for spec in specs.values():
        equal.setdefault((spec.shape, spec.ranges), []).append(spec)
    return sum(
        len(members) * method.make_store({members[0].name: members[0]}, comm, meta).nbytes for members in equal.values()
    )
