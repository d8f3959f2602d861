"""The lines that a plan adds to the start-up report: bytes and, with `fitting`, memory."""

from __future__ import annotations

from collections.abc import Mapping

from lowbit_strategy import leaves
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.weight_codings import Exact, WeightCode, WeightCoding, WeightDelta
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.messages import internode_nbytes, step_nbytes
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.plan.weight_bytes import kept_nbytes, weight_transfers
from lowbit_strategy.ranks.ranks import Ranks

# The codings of weights that a report compares.
CHOICES: tuple[WeightCoding, ...] = (
    Exact(),
    Exact(keep="replica"),
    WeightCode(keep="nothing"),
    WeightCode(),
    WeightCode(keep="replica"),
    WeightDelta(),
)
_MEMORY = "lowbit_strategy.fitting.memory:lines"


def lines_of(sync: GradientSync, ranks: Ranks) -> list[str]:
    """The lines about the parameters that `ranks` reduce in a run."""
    return lines(plan_of(sync, ranks=ranks))


def lines(plan: StepPlan) -> list[str]:
    """The lines of a plan."""
    rounds, found = plan.round_plan, list[str]()
    if sent := plan.sent_nbytes:
        per_step, mean = sent / plan.every, ""
        fp32, bf16 = plan.uncompressed_nbytes(4), plan.uncompressed_nbytes(2)
        if rounds is not None:
            found.append(f"  {rounds.label}: a rank sends {size(sent)} per round of {plan.every} steps")
            mean = " on average"
        found.append(
            f"  sent by a rank {size(per_step)}/step{mean};"
            f" fp32 {size(fp32)} ({fp32 / per_step:.1f}x),"
            f" bf16 {size(bf16)} ({bf16 / per_step:.1f}x)"
        )
        found += _levels(plan)
    if plan.coding is not None and plan.topology.num_peers > 1:
        others = [other for other in CHOICES if other != plan.coding]
        in_all = size(plan.sent_nbytes + step_nbytes(plan.weights))
        found.append(f"  weights take {_cost(plan, plan.coding)}; {in_all}/step in all")
        found += [f"    instead: {describe_weights(each, plan.modules)}, {_cost(plan, each)}" for each in others]
    found += plan.companion.lines(plan)
    if leaves.is_present(_MEMORY):
        found += leaves.load(_MEMORY, "memory")(plan)
    return found


def _levels(plan: StepPlan) -> list[str]:
    """The line on bytes inside a node and between nodes; empty if there is one node."""
    topology = plan.topology
    if topology.num_nodes == 1:
        return []
    near, exact = plan.sent_nbytes - plan.between_nbytes, plan.intra_node_nbytes
    kind = "exact gradients" if topology.coding is None else f"gradients, summed from {topology.coding.label}"
    inside = f" and {size(exact)}/step of {kind}" if exact else ""
    why = f"; one level, because {topology.obstacle or 'two_level=False'}" if topology.node_size is None else ""
    return [f"  between nodes {size(plan.between_nbytes)}/step, inside a node {size(near)}/step{inside}{why}"]


def _cost(plan: StepPlan, coding: WeightCoding) -> str:
    """The cost of FSDP2's weights to a rank in a step of one forward and one backward pass."""
    units = weight_transfers(coding, plan.modules, plan.topology, plan.wrapper)
    kept = kept_nbytes(coding, plan.modules, plan.topology, plan.wrapper)
    memory = f"{size(kept)} of memory per rank" if kept else "no more memory than FSDP2's"
    ours = plan.topology.num_nodes != 1 and coding != Exact()  # FSDP2's own gathers are not counted per node
    between = f" ({size(internode_nbytes(units))} between nodes)" if ours else ""
    return f"{size(step_nbytes(units))}/step{between}, {memory}"


def describe_weights(coding: WeightCoding, modules: Mapping[str, ModuleLayout]) -> str:
    """Describe how FSDP2's weights are coded and kept between gathers."""
    again = any(layout.num_gathers > 1 for layout in modules.values())  # otherwise FSDP2 frees nothing after forward
    keeps = {
        "nothing": "gathered again in backward" if again else "sent once, as FSDP2 keeps them until backward",
        "codes": "kept as codes",
        "replica": "kept as a replica",
    }
    return f"{coding.label}, {keeps[coding.keep]}"
