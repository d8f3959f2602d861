"""The framework's own messages, without compression."""

from __future__ import annotations

import math
from dataclasses import replace

from lowbit_strategy.advisor.cost import Ring, ranks_per_node
from lowbit_strategy.plan.messages import Level, TransferGroup
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.reduced import ddp_buckets


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
    """The framework's own messages for the same model on the same ranks.

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
    scattered = plan.wrapper == "fsdp"
    hops = 1 if scattered else 2
    # HSDP: inside the node as before, between nodes a ring of shards: as bytes per node a ring of everything
    sizes = _reduced_as_one(plan, itemsize)
    rings = {numel: (ring_of(numel * itemsize, plan, hops=hops, scattered=scattered),) for _, numel in sizes}
    weights = []
    for transfer in plan.weights:
        module, messages = plan.modules[transfer.name], transfer.messages
        if plan.wrapper != "hsdp":
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
    if plan.wrapper != "ddp":
        return [(transfer.name, transfer.numel) for transfer in plan.gradients or plan.rounds]
    numels = {name: spec.whole_numel for name, spec in plan.specs.items()}
    buckets = ddp_buckets((name, numel, itemsize) for name, numel in numels.items())
    return [(bucket.name, sum(numels[name] for name in bucket.names)) for bucket in buckets]
