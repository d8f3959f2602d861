"""How long a step takes: a pure function of a plan, of links and of a step's time without communication.

A message takes ``collectives in series x latency + bytes / bandwidth``; encoding and decoding come on top. What of it
shows in a step depends on what it can overlap:

* DDP, HSDP: a bucket is sent once backward has produced it, ``T = max(compute, bucket by bucket) + last bucket``, and
  the optimizer after it; under DDP half of what that hides is not hidden where ranks share processors
* FSDP2: the next module's weights are gathered while one computes; gradients follow each module's backward pass.
  Without a device of its own that works ahead, as on CPU, a rank waits for each collective before it goes on
* local steps: a round's messages, less what its delay hides, over the steps of the round

Where messages are sent, and gradients coded, by the processors that compute (`Work`), a step takes its compute and all
of that work at least, regardless of overlap: ``T >= compute + work``.

Bounds: everything that can overlap does (`low`), or nothing does (`high`).

References:
    Agarwal et al., "On the Utility of Gradient Compression in Distributed Training Systems", MLSys 2022, arXiv
    2103.00543, section 4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lowbit_strategy.advisor.cluster import ANY_RATE, Cluster, Link
from lowbit_strategy.plan.messages import RING_SCATTER, RINGS, Message, TransferGroup, hop_nbytes
from lowbit_strategy.plan.plan import StepPlan

FORWARD_SHARE = 1 / 3  # of a step's compute: backward takes twice as long


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, with lower and upper bounds that assume correct inputs."""

    seconds: float
    low: float
    high: float


def message_seconds(message: Message, cluster: Cluster, ranks_per_node: int) -> tuple[float, float]:
    """Latency and transfer time of a message; all ranks of a node send at once."""
    times = _times(message, cluster)
    number = max(1, message.in_series)
    each = message.total_nbytes / number
    link = _link_of(message, cluster)
    if cluster.rings is not None and message.what in RINGS:
        return _split_time([(link, each)], times * number, times * message.in_series * link.latency_s)
    in_series = message.in_series if message.tree_steps is None or cluster.gloo else message.tree_steps
    latency = times * in_series * cluster.latency_multiplier * link.latency_s
    parts = [
        (cluster.inter_node, message.internode_fraction * ranks_per_node * each),
        (cluster.intra_node, each - message.internode_fraction * each),
    ]
    if message.what in RINGS:  # a ring passes its pieces on while others arrive: its slowest link sets the pace
        slowest_s = max(link.traveling_s(nbytes) for link, nbytes in parts)
        busy_s = max(link.split_s(nbytes)[1] for link, nbytes in parts)
        return latency + times * number * (slowest_s - busy_s), times * number * busy_s
    return _split_time([part for part in parts if part[1]], times * number, latency)


def _link_of(message: Message, cluster: Cluster) -> Link:
    """The link whose latency it waits for."""
    if cluster.rings is not None and message.what in RINGS:
        return cluster.rings.between if message.internode_fraction else cluster.rings.inside
    return cluster.inter_node if message.internode_fraction else cluster.intra_node


def _split_time(parts: Sequence[tuple[Link, float]], times: float, latency: float) -> tuple[float, float]:
    """Latency and transfer time: other messages can use the links during the first, not during the second."""
    waiting, busy = latency, 0.0
    for link, nbytes in parts:
        beginning, sending = link.split_s(nbytes)
        waiting += times * beginning
        busy += times * sending
    return waiting, busy


def _times(message: Message, cluster: Cluster) -> int:
    return 2 if message.what == RING_SCATTER and cluster.gloo else 1


@dataclass(frozen=True, slots=True)
class _Cost:
    latency: float
    busy: float  # encoding, copies and bytes
    work: float = 0.0  # of the processors that compute

    @property
    def seconds(self) -> float:
        return self.latency + self.busy

    def __add__(self, other: _Cost) -> _Cost:
        return _Cost(self.latency + other.latency, self.busy + other.busy, self.work + other.work)


def transfer_cost(transfer: TransferGroup, cluster: Cluster, ranks_per_node: int) -> _Cost:
    """Of one transfer."""
    parts = [message_seconds(message, cluster, ranks_per_node) for message in transfer.messages]
    encoding = 0.0
    if cluster.coding is not None and transfer.encoded_numel:
        encoding = transfer.encoded_numel / cluster.coding.numel_per_s + cluster.coding.bucket_s
    encoding += transfer.copied_nbytes / cluster.memcpy_nbytes_per_s if cluster.memcpy_nbytes_per_s else 0.0
    work = 0.0
    if cluster.cpu_oversubscription is not None:
        work = encoding
        for message in transfer.messages:
            if (own := _link_of(message, cluster).work) is not None:
                each = message.in_series * own.message_s + message.total_nbytes * own.nbyte_s
                work += _times(message, cluster) * each
    return _Cost(sum(latency for latency, _ in parts), sum(busy for _, busy in parts) + encoding, work)


def transfer_costs(transfers: Sequence[TransferGroup], cluster: Cluster, ranks_per_node: int) -> list[_Cost]:
    """Of each; layers of one shape are alike, and have the same tuple of messages."""
    known: dict[tuple[object, ...], _Cost] = {}
    costs = []
    for transfer in transfers:
        key = id(transfer.messages), transfer.encoded_numel, transfer.copied_nbytes
        if key not in known:
            known[key] = transfer_cost(transfer, cluster, ranks_per_node)
        costs.append(known[key])
    return costs


def step_time(plan: StepPlan, cluster: Cluster, compute_s: float, optimizer_s: float = 0.0) -> StepTime:
    """Of one step, a mean over a round where steps are local.

    Args:
        plan: What is sent.
        cluster: On what.
        compute_s: A step without communication: forward, backward, optimizer.
        optimizer_s: Of these, the optimizer's, which begins when all communication has ended.
    """
    if plan.topology.far:
        cluster = replace(cluster, latency_multiplier=1)  # receives are posted ahead
    optimizer_s = min(optimizer_s, compute_s)
    beside_s = compute_s - optimizer_s
    per_node = ranks_per_node(plan)
    gradients = transfer_costs(plan.gradients, cluster, per_node)
    weights = transfer_costs(plan.weights, cluster, per_node)
    step = _sum(plan.gradients, gradients) + _sum(plan.weights, weights)
    rounds = _sum(plan.rounds, transfer_costs(plan.rounds, cluster, per_node))
    late = rounds + _sum(plan.state, transfer_costs(plan.state, cluster, per_node))
    hidden = 0.0 if plan.outer is None else plan.outer.delay_of(plan.outer.shortest_turn) * compute_s
    turns = 1 if plan.outer is None else plan.outer.fragments
    shown = max(late.work, late.seconds - turns * hidden) / plan.every
    last = gradients[-1].seconds if gradients else 0.0
    low = max(compute_s + step.work, step.busy + optimizer_s)
    low += max(rounds.work, rounds.busy - turns * hidden) / plan.every
    longer = max(0.0, _passing_s(plan, plan.hop_nbytes, cluster) - sum(cost.busy for cost in gradients))
    if plan.topology.far:
        longer += max(0.0, _passing_s(plan, hop_nbytes(plan.weights), cluster) - sum(cost.busy for cost in weights))
    high = compute_s + step.seconds + longer + late.seconds / plan.every
    if not weights:
        seconds = _bucket_by_bucket(plan, gradients, cluster, beside_s)
        seconds += _hidden_less(plan, beside_s + max(step.seconds, step.work) - seconds, cluster)
    elif not cluster.gloo:
        seconds = _with_prefetch(plan, gradients, weights, beside_s)
    else:
        seconds = _in_turn(plan, gradients, weights, cluster, beside_s)
    return StepTime(max(low, min(high, optimizer_s + seconds + shown)), low, max(high, low + last))


def _sum(transfers: Sequence[TransferGroup], costs: Sequence[_Cost]) -> _Cost:
    """Of a step, or of a round."""
    latency = busy = work = 0.0
    for transfer, cost in zip(transfers, costs, strict=True):
        latency += transfer.repeats * cost.latency
        busy += transfer.repeats * cost.busy
        work += transfer.repeats * cost.work
    return _Cost(latency, busy, work)


def ranks_per_node(plan: StepPlan) -> int:
    """Ranks per node, or 1 if unknown."""
    return plan.topology.ranks_per_node or 1


def _bucket_by_bucket(plan: StepPlan, costs: Sequence[_Cost], cluster: Cluster, compute_s: float) -> float:
    """Buckets leave in the order of backward; two are under way at a time, and all where ranks are far apart.

    Processor time of earlier buckets delays backward, and so the next bucket. All buckets together are no faster than
    the link's sustained rate, although each alone may be a burst.
    """
    transfers = plan.gradients
    total = sum(transfer.numel for transfer in transfers) or 1
    ready, free, arrived, passed = FORWARD_SHARE * compute_s, 0.0, 0.0, 0.0
    at_a_time = min(2, len(transfers))
    for at, (transfer, cost) in enumerate(zip(transfers, costs, strict=True)):
        ready += (1 - FORWARD_SHARE) * compute_s * transfer.numel / total
        alone = at == len(transfers) - 1
        if at == 0:
            passed = ready + cost.latency + _passing_s(plan, plan.hop_nbytes, cluster)
        free = max(free, ready) + cost.busy
        ready += cost.work
        arrived = free + cost.latency
        if not plan.topology.far:
            free += cost.latency / (1 if alone else at_a_time)
    return max(ready, compute_s, passed, arrived if plan.topology.far else free)


def _hidden_less(plan: StepPlan, hidden_s: float, cluster: Cluster) -> float:
    """When CPUs are oversubscribed, only half of the ideal overlap is achieved: between two messages a bucket waits for
    a processor. The framework's own rings do not; nor do far messages, which need none for most of their way.
    """
    own = any(message.what not in RINGS for transfer in plan.gradients for message in transfer.messages)
    return max(0.0, hidden_s) / 2 if own and cluster.cpu_oversubscription is not None and not plan.topology.far else 0.0


def _passing_s(plan: StepPlan, hops: Mapping[str, float], cluster: Cluster) -> float:
    """Seconds in which all bytes leave a node. `hops`: those of one rank, by hop.

    One after the other; the framework's own rings take as long as each of them takes. Where ranks are far apart all of
    one hop travel as one message, and those of the next in the same stream or, if that is sooner, after them: a way
    that holds one hop's may overflow with both.
    """
    link, per_node = cluster.inter_node, ranks_per_node(plan)
    total = per_node * sum(hops.values())
    streaming_s = link.streaming_s(total)
    if not plan.topology.far:
        return streaming_s
    one_by_one_s = sum(link.traveling_s(per_node * nbytes) for nbytes in hops.values())
    return max(streaming_s, min(link.traveling_s(total), one_by_one_s))


def _in_turn(
    plan: StepPlan, gradients: Sequence[_Cost], weights: Sequence[_Cost], cluster: Cluster, compute_s: float
) -> float:
    """FSDP2 waits for each collective; what goes on beside it are messages between replicas, and between far ranks."""
    gathered = _sum(plan.weights, weights)
    if plan.layout != "hsdp" and not plan.topology.far:
        return compute_s + gathered.seconds + _sum(plan.gradients, gradients).seconds
    parts = [_split(transfer, cluster, ranks_per_node(plan)) for transfer in plan.gradients]
    inside = sum(near.seconds for near, _ in parts)
    waited = gathered.seconds
    if plan.topology.far and plan.coding is not None and plan.coding.keep != "nothing":  # all codes leave at once
        coded = [transfer for transfer in plan.weights if transfer.encoded_numel]
        far = [_split(transfer, cluster, ranks_per_node(plan))[1] for transfer in coded]
        waited -= sum(each.latency for each in far) - max((each.latency for each in far), default=0.0)
        waited += max(0.0, _passing_s(plan, hop_nbytes(coded), cluster) - sum(each.busy for each in far))
    return _bucket_by_bucket(plan, [far for _, far in parts], cluster, compute_s + waited + inside)


def _split(transfer: TransferGroup, cluster: Cluster, ranks_per_node: int) -> tuple[_Cost, _Cost]:
    """Of its messages inside a node, and of the others and of coding."""
    near = tuple(message for message in transfer.messages if message.level == "intra-node")
    far = tuple(message for message in transfer.messages if message.level != "intra-node")
    inside = replace(transfer, messages=near, encoded_numel=0)
    outside = replace(transfer, messages=far, copied_nbytes=0)
    return transfer_cost(inside, cluster, ranks_per_node), transfer_cost(outside, cluster, ranks_per_node)


def _with_prefetch(plan: StepPlan, gradients: Sequence[_Cost], weights: Sequence[_Cost], compute_s: float) -> float:
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
        at = cluster.between_nodes(Link(cluster.inter_node.latency_s, nbytes_per_s))
        return step_time(plan, at, compute_s).seconds

    return seconds


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
    for _ in range(11):  # to a hundredth
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return low if low < 0.9 * ANY_RATE else ANY_RATE
