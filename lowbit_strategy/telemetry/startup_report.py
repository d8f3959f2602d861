"""The start-up report: what is compressed, what is not and why, bytes, memory and kernels."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import torch

from lowbit_strategy import leaves
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels import backends
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.weight_codings import CHOICES, Exact, WeightCoding
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.messages import internode_nbytes, step_nbytes
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.weight_bytes import kept_nbytes, weight_transfers
from lowbit_strategy.ranks.ranks import Ranks, Topology

_LONGEST_PHASE = 1 << 20
_MEMORY = "lowbit_strategy.fitting.memory:lines"


@dataclass(slots=True)
class Group:
    """Parameters that share a method and a reason."""

    kind: str
    method: str
    reason: str
    num_tensors: int = 0
    numel: int = 0
    sent_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """Describes in words what one rank sends in each step.

    Args:
        plan: Plan of the run.
        compressor: The plan's compressor.
        device: Device of the kernels.
        step_index: Optimizer steps completed.
        dims: The dims of the mesh, if it has several.
    """

    plan: StepPlan
    compressor: Compressor
    device: torch.device
    step_index: int = 0
    dims: str = ""

    @property
    def groups(self) -> list[Group]:
        """Groups of compressed, high-precision and exempt parameters, the largest first."""
        groups: dict[tuple[str, str, str], Group] = {}
        for name, assignment in self.plan.assignments.items():
            spec = self.plan.specs[name]
            key = (assignment.kind, assignment.method.description(spec), assignment.reason)
            group = groups.setdefault(key, Group(*key))
            group.num_tensors += 1
            group.numel += spec.whole.numel
            group.sent_nbytes += assignment.method.wire_nbytes(spec, self.plan.topology.num_peers)
        return sorted(groups.values(), key=lambda group: -group.numel)

    @property
    def kernels(self) -> str:
        """The backend of the kernels and, on a GPU, the methods without a kernel."""
        compressed = [each.method for each in self.plan.assignments.values() if each.kind == "compressed"]
        plain = sorted({method.label for method in compressed if not _has_kernels(method)})
        names = backends.describe(self.device)
        return f"{names}; plain PyTorch for {', '.join(plain)}" if plain and self.device.type == "cuda" else names

    @property
    def next_phase(self) -> int | None:
        """The step in which the compressor changes its configuration, as at the end of a warm-up; None: never, or not
        within a million steps.
        """
        now = self.compressor.phase(self.step_index)
        steps = range(self.step_index + 1, self.step_index + _LONGEST_PHASE)
        at = bisect.bisect_left(steps, True, key=lambda step: self.compressor.phase(step) != now)
        return steps[at] if at < len(steps) else None

    def render(self) -> str:
        plan, rounds = self.plan, self.plan.round_plan
        what = "reduce-scatter" if plan.scatter else "all-reduce"
        kind, period = ("gradient", "step") if rounds is None else (rounds.sends, "round")
        ranks = describe_ranks(plan.topology)
        lines = [f"lowbit_strategy: compressed {kind} {what} over {ranks}, kernels: {self.kernels}"]
        lines += [f"  mesh: {self.dims}"] if self.dims else []
        for group in self.groups:
            lines.append(
                f"  {group.kind:<10} {group.num_tensors:>5} tensors {group.numel:>13,} elements"
                f" {size(group.sent_nbytes):>10}/{period}  {group.method} ({group.reason})"
            )
        if sent := plan.sent_nbytes:
            per_step, mean = sent / plan.every, ""
            fp32, bf16 = plan.uncompressed_nbytes(4), plan.uncompressed_nbytes(2)
            if rounds is not None:
                lines.append(f"  {rounds.label}: a rank sends {size(sent)} per round of {plan.every} steps")
                mean = " on average"
            lines.append(
                f"  sent by a rank {size(per_step)}/step{mean};"
                f" fp32 {size(fp32)} ({fp32 / per_step:.1f}x),"
                f" bf16 {size(bf16)} ({bf16 / per_step:.1f}x)"
            )
            lines += self._levels()
        else:
            lines.append("  one rank: nothing is sent, so nothing is compressed")
        if (step := self.next_phase) is not None:
            lines.append(f"  until step {step}, where the compressor's next phase begins")
        if plan.coding is not None and plan.topology.num_peers > 1:
            lines += self._weights(plan.coding)
        lines += plan.companion.lines(plan)
        if leaves.is_present(_MEMORY):
            lines += leaves.load(_MEMORY, "memory")(plan)
        return "\n".join(lines)

    def _levels(self) -> list[str]:
        """What is sent inside a node and between nodes; empty if there is one node."""
        plan, topology = self.plan, self.plan.topology
        if not topology.has_nodes:
            return []
        near, exact = plan.sent_nbytes - plan.between_nbytes, plan.intra_node_nbytes
        kind = "exact gradients" if topology.coding is None else f"gradients, summed from {topology.coding.label}"
        inside = f" and {size(exact)}/step of {kind}" if exact else ""
        why = f"; one level, because {topology.obstacle or 'two_level=False'}" if topology.node_size is None else ""
        between = size(plan.between_nbytes)
        return [f"  between nodes {between}/step, inside a node {size(near)}/step{inside}{why}"]

    def _weights(self, used: WeightCoding) -> list[str]:
        """How weights are sent, which modules are sent exactly because they cannot be coded, and the alternatives."""
        plan = self.plan
        sent = size(plan.sent_nbytes + step_nbytes(plan.weights))
        lines = [f"  weights: {_describe_weights(plan, used)}; {sent}/step in all"]
        exact = [name or "the model" for name, layout in plan.modules.items() if not layout.coded]
        if exact and used != Exact():
            named = ", ".join(exact[:3]) + (", ..." if len(exact) > 3 else "")
            lines.append(
                f"    not coded: {named} (parameters of several types, or that the module gathers in its own way)"
            )
        return lines + [f"    instead: {_describe_weights(plan, other)}" for other in CHOICES if other != used]


def _describe_weights(plan: StepPlan, coding: WeightCoding) -> str:
    """One way to send FSDP2's weights, and its cost to a rank in a step of one forward and one backward pass."""
    again = any(layout.num_gathers > 1 for layout in plan.modules.values())  # or FSDP2 frees nothing after forward
    keeps = {
        "nothing": "gathered again in backward" if again else "sent once, as FSDP2 keeps them until backward",
        "codes": "kept as codes",
        "replica": "kept as a replica",
    }
    units = weight_transfers(coding, plan.modules, plan.topology, plan.layout)
    kept = kept_nbytes(coding, plan.modules, plan.topology, plan.layout)
    memory = f"{size(kept)} of memory per rank" if kept else "no more memory than FSDP2's"
    ours = plan.topology.has_nodes and coding != Exact()  # FSDP2's own gathers are not counted by node
    between = f" ({size(internode_nbytes(units))} between nodes)" if ours else ""
    return f"{coding.label}, {keeps[coding.keep]}, {size(step_nbytes(units))}/step{between}, {memory}"


def build_report(sync: GradientSync, ranks: Ranks | None = None) -> Report:
    """The report on the parameters that `ranks` reduce; None: the ranks that reduce most parameters."""
    dims = (ranks or sync.ranks).dims
    return Report(sync.plan(ranks=ranks), sync.compressor, sync.device, sync.step_index, dims)


def render_reports(sync: GradientSync) -> str:
    """The reports of an engine, one for each group of ranks that reduces parameters."""
    return "\n".join(build_report(sync, ranks).render() for ranks in sync.all_ranks)


def _has_kernels(method: Method) -> bool:
    """Whether a GPU codes with kernels instead of PyTorch operations."""
    return isinstance(method, CodecPair) and method.uplink.in_one_pass and method.downlink.in_one_pass


def describe_ranks(topology: Topology) -> str:
    """Describe which ranks reduce what together."""
    if topology.node_size is None:
        return f"{topology.num_peers} ranks"
    inside = "exact" if topology.coding is None else topology.coding.label
    return f"{topology.num_peers} groups of {topology.num_parts} ranks, {inside} inside a group"
