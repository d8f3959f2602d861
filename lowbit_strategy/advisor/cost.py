"""Computes the time of a step as a pure function of a plan, of links and of the step's time without communication.

A message takes ``collectives in series x latency + bytes / bandwidth``; encoding and decoding come on top. How much of
this shows in a step depends on what it can overlap:

* DDP, HSDP: a bucket is sent once backward has produced it, ``T = max(compute, bucket by bucket) + last bucket``. On
  CPUs under DDP coded buckets of near ranks hide nothing: processors that encode and send them do not compute
* FSDP2: the next module's weights are gathered while one computes; gradients follow each module's backward pass.
  Without a device that works ahead, as on CPU, a rank waits for each collective before it continues
* local steps: a round's messages, less what its delay hides, over the steps of the round

Bounds: everything that can overlap does (`low`), or nothing does (`high`).

References:
    Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022, arXiv
    2103.00543, section 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lowbit_strategy.advisor.cluster import Cluster, Link
from lowbit_strategy.plan.messages import EXACT_WEIGHTS, Message, TransferGroup
from lowbit_strategy.plan.plan import StepPlan

FORWARD_SHARE = 1 / 3  # fraction of a step's compute: backward takes twice as long


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, with lower and upper bounds that assume correct inputs."""

    seconds: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of messages.

    Args:
        latency: Seconds in which other messages can use the links.
        busy: Seconds in which they cannot: bytes, and encoding.
    """

    latency: float = 0.0
    busy: float = 0.0

    @property
    def seconds(self) -> float:
        return self.latency + self.busy

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.latency + other.latency, self.busy + other.busy)

    def __mul__(self, times: float) -> Cost:
        return Cost(times * self.latency, times * self.busy)


@dataclass(frozen=True, slots=True)
class Ring(Message):
    """A collective of the framework's own, as it would go over a ring.

    Args:
        scattered: It ends with a part of the sum.
        tree_steps: Collectives in series if a tree of the nodes is used instead; None: it cannot be.
    """

    scattered: bool = False
    tree_steps: int | None = None


def message_cost(message: Message, cluster: Cluster, ranks_per_node: int) -> Cost:
    """Cost of one message; all ranks of a node send at once."""
    ring = message if isinstance(message, Ring) else None
    times = 2 if ring is not None and ring.scattered and cluster.gloo else 1
    number = max(1, message.in_series)
    each = message.total_nbytes / number
    slow = cluster.inter_node if message.internode_fraction else cluster.intra_node
    is_ring = ring is not None or message.what == EXACT_WEIGHTS
    if is_ring and slow.ring is not None:
        beginning, busy = slow.ring.split_s(each)
        return Cost(message.in_series * slow.ring.latency_s + number * beginning, number * busy) * times
    in_series = message.in_series if ring is None or ring.tree_steps is None or cluster.gloo else ring.tree_steps
    waiting = Cost(in_series * slow.latency_s)
    between = cluster.inter_node.split_s(message.internode_fraction * ranks_per_node * each)
    inside = cluster.intra_node.split_s(each - message.internode_fraction * each)
    if not is_ring:
        return (waiting + Cost(*between) * number + Cost(*inside) * number) * times
    busy = max(between[1], inside[1])  # it passes its pieces on while others arrive: its slowest link sets the pace
    slowest = max(sum(between), sum(inside))
    return (waiting + Cost(slowest - busy, busy) * number) * times


def transfer_cost(transfer: TransferGroup, cluster: Cluster, ranks_per_node: int) -> Cost:
    """Cost of one transfer."""
    coding = cluster.coding
    encoding = 0.0
    if coding is not None and transfer.encoded_numel:
        encoding = transfer.encoded_numel / coding.numel_per_s + coding.bucket_s
    messages = (message_cost(message, cluster, ranks_per_node) for message in transfer.messages)
    return sum(messages, Cost(busy=encoding))


def _transfer_costs(transfers: Sequence[TransferGroup], cluster: Cluster, ranks_per_node: int) -> list[Cost]:
    """Cost of each; layers of the same shape cost the same."""
    known: dict[tuple[tuple[Message, ...], int], Cost] = {}
    costs = []
    for transfer in transfers:
        key = transfer.messages, transfer.encoded_numel
        if key not in known:
            known[key] = transfer_cost(transfer, cluster, ranks_per_node)
        costs.append(known[key])
    return costs


def step_time(plan: StepPlan, cluster: Cluster, compute_s: float) -> StepTime:
    """Time of one step; a mean over a round where steps are local.

    Args:
        plan: What is sent.
        cluster: What it runs on.
        compute_s: A step without communication: forward, backward, optimizer.
    """
    per_node = ranks_per_node(plan)
    gradients, weights, rounds, extra = (
        _transfer_costs(transfers, cluster, per_node)
        for transfers in (plan.gradients, plan.weights, plan.rounds, plan.extra)
    )
    step = _sum(plan.gradients, gradients) + _sum(plan.weights, weights)
    per_round = _sum(plan.rounds, rounds)
    late = per_round + _sum(plan.extra, extra)
    hidden = 0.0
    if plan.round_plan is not None:
        hidden = plan.round_plan.steps_under_way * compute_s
    if not weights:
        coded = any(transfer.encoded_numel for transfer in plan.gradients)
        hides = not (coded and cluster.gloo) or plan.topology.far
        seconds = _bucket_by_bucket(plan, gradients, compute_s) if hides else compute_s + step.seconds
    elif not cluster.gloo:
        seconds = _with_prefetch(plan, gradients, weights, compute_s)
    else:
        seconds = _in_turn(plan, gradients, weights, cluster, compute_s)
    seconds += max(0.0, late.seconds - hidden) / plan.every
    low = max(compute_s, step.busy) + max(0.0, per_round.busy - hidden) / plan.every
    high = compute_s + step.seconds + late.seconds / plan.every
    last = gradients[-1].seconds if gradients else 0.0
    return StepTime(max(low, min(high, seconds)), low, max(high, low + last))


def _sum(transfers: Sequence[TransferGroup], costs: Sequence[Cost]) -> Cost:
    """Cost of a step, or of a round."""
    return sum((cost * transfer.repeats for transfer, cost in zip(transfers, costs, strict=True)), Cost())


def ranks_per_node(plan: StepPlan) -> int:
    """Ranks per node, or 1 if unknown."""
    return plan.topology.ranks_per_node or 1


def _bucket_by_bucket(plan: StepPlan, costs: Sequence[Cost], compute_s: float) -> float:
    """Buckets leave in the order of backward; two are under way at a time, and all where ranks are far apart."""
    total = sum(transfer.numel for transfer in plan.gradients) or 1
    ready, free, arrived = FORWARD_SHARE * compute_s, 0.0, 0.0
    for transfer, cost in zip(plan.gradients, costs, strict=True):
        ready += (1 - FORWARD_SHARE) * compute_s * transfer.numel / total
        free = max(free, ready) + cost.busy
        arrived = free + cost.latency
        if not plan.topology.far:
            free += cost.latency / 2
    return max(compute_s, arrived)


def _in_turn(
    plan: StepPlan, gradients: Sequence[Cost], weights: Sequence[Cost], cluster: Cluster, compute_s: float
) -> float:
    """FSDP2 waits for each collective; meanwhile only messages between replicas and between far ranks travel."""
    gathered = _sum(plan.weights, weights).seconds
    if plan.wrapper != "hsdp" and not plan.topology.far:
        return compute_s + gathered + _sum(plan.gradients, gradients).seconds
    parts = [_split(transfer, cluster, ranks_per_node(plan)) for transfer in plan.gradients]
    inside = sum(near.seconds for near, _ in parts)
    if plan.topology.far and plan.coding is not None and plan.coding.keep != "nothing":  # all codes leave at once
        coded = (transfer for transfer in plan.weights if transfer.encoded_numel)
        latencies = [_split(transfer, cluster, ranks_per_node(plan))[1].latency for transfer in coded]
        gathered -= sum(latencies) - max(latencies, default=0.0)
    return _bucket_by_bucket(plan, [far for _, far in parts], compute_s + gathered + inside)


def _split(transfer: TransferGroup, cluster: Cluster, ranks_per_node: int) -> tuple[Cost, Cost]:
    """Costs of its messages inside a node, and of the others with coding."""
    near = tuple(message for message in transfer.messages if message.level == "intra-node")
    far = tuple(message for message in transfer.messages if message.level != "intra-node")
    inside, outside = replace(transfer, messages=near, encoded_numel=0), replace(transfer, messages=far)
    return transfer_cost(inside, cluster, ranks_per_node), transfer_cost(outside, cluster, ranks_per_node)


def _with_prefetch(plan: StepPlan, gradients: Sequence[Cost], weights: Sequence[Cost], compute_s: float) -> float:
    """One link, in the order of use: weights before a module runs, its gradients after its backward pass."""
    modules = list(zip(plan.weights, weights, strict=True))
    total = sum(transfer.numel for transfer in plan.weights) or 1
    link = done = 0.0
    for transfer, cost in modules:
        link += cost.seconds  # issued while the module before computes
        done = max(done, link) + FORWARD_SHARE * compute_s * transfer.numel / total
        link = max(link, done - FORWARD_SHARE * compute_s * transfer.numel / total)
    link = max(link, done)
    waiting = list(gradients)
    each = len(waiting) / max(1, len(modules))
    sent = 0.0
    for transfer, cost in reversed(modules):
        if transfer.repeats > 1:
            link += cost.seconds
        done = max(done, link) + (1 - FORWARD_SHARE) * compute_s * transfer.numel / total
        sent += each
        while sent >= 1 and waiting:
            link = max(link, done) + waiting.pop(0).seconds
            sent -= 1
    link += sum(cost.seconds for cost in waiting)
    return max(done, link)


def over_bandwidth(plan: StepPlan, cluster: Cluster, compute_s: float) -> Callable[[float], float]:
    """Seconds of a step as a function of the bytes per second between nodes."""

    @functools.cache
    def seconds(nbytes_per_s: float) -> float:
        link = Link(cluster.inter_node.latency_s, nbytes_per_s)
        return step_time(plan, replace(cluster, inter_node=link), compute_s).seconds

    return seconds
