"""The start-up report: what is compressed, what is not and why, bytes, memory, kernels."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels import backends
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import CodecPair, Method
from lowbit_strategy.methods.weights import CHOICES, Exact, WeightCoding
from lowbit_strategy.plan.messages import internode_nbytes, step_nbytes
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.squares import few_bits
from lowbit_strategy.plan.weights import kept_nbytes, weight_transfers
from lowbit_strategy.ranks.topology import Topology

_LONGEST_PHASE = 1 << 20


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
class WeightChoice:
    """One way of sending weights, and what it costs a rank.

    Args:
        label: What travels, and what is kept of it.
        step_nbytes: Bytes sent to others per step of one forward and one backward pass.
        kept_nbytes: Memory for what is kept until the next step.
        between_nbytes: Of `step_nbytes`, what leaves the node. None: there is one node, or FSDP2 itself gathers.
    """

    label: str
    step_nbytes: int
    kept_nbytes: int
    between_nbytes: int | None = None

    def render(self) -> str:
        between = "" if self.between_nbytes is None else f" ({size(self.between_nbytes)} between nodes)"
        memory = f"{size(self.kept_nbytes)} of memory per rank" if self.kept_nbytes else "no more memory than FSDP2's"
        return f"{self.label}, {size(self.step_nbytes)}/step{between}, {memory}"


def _choice(plan: StepPlan, coding: WeightCoding) -> WeightChoice:
    again = any(layout.num_gathers > 1 for layout in plan.modules.values())  # or FSDP2 frees nothing after forward
    kept = {
        "nothing": "gathered anew in backward" if again else "sent once, as FSDP2 keeps them until backward",
        "codes": "kept as codes",
        "replica": "kept as a replica",
    }
    ours, units = coding != Exact(), weight_transfers(coding, plan.modules, plan.topology, plan.layout)
    return WeightChoice(
        f"{coding.label}, {kept[coding.keep]}",
        step_nbytes(units),
        kept_nbytes(coding, plan.modules, plan.topology, plan.layout),
        internode_nbytes(units) if plan.topology.has_nodes and ours else None,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank sends in each step, in words.

    Args:
        plan: Of the run.
        groups: Compressed, high precision and exempt, largest first.
        weights: How FSDP2's weights travel, and what other ways would cost; the one in use first. Empty under DDP.
        kernels: Which implementation serves.
        next_phase: Step in which the compressor changes its configuration, as at the end of a warm-up; None: never.
    """

    plan: StepPlan
    groups: list[Group]
    weights: list[WeightChoice]
    kernels: str
    next_phase: int | None

    @property
    def buffer_nbytes(self) -> int:
        """Memory for messages on this rank, and for coding them where no kernel does, at most."""
        return self.plan.memory.messages + self.plan.memory.working

    def render(self) -> str:
        plan, memory, outer = self.plan, self.plan.memory, self.plan.outer
        what = "reduce-scatter" if plan.scatter else "all-reduce"
        kind, period = ("gradient", "step") if outer is None else ("pseudo-gradient", "round")
        ranks = describe_ranks(plan.topology)
        lines = [f"lowbit_strategy: compressed {kind} {what} over {ranks}, kernels: {self.kernels}"]
        for group in self.groups:
            lines.append(
                f"  {group.kind:<10} {group.num_tensors:>5} tensors {group.numel:>13,} elements"
                f" {size(group.sent_nbytes):>10}/{period}  {group.method} ({group.reason})"
            )
        if sent := plan.sent_nbytes:
            per_step, mean = sent / plan.every, ""
            fp32, bf16 = plan.uncompressed_nbytes(4), plan.uncompressed_nbytes(2)
            if outer is not None:
                lines.append(f"  {outer.label}: a rank sends {size(sent)} per round of {plan.every} steps")
                mean = " on average"
            lines.append(
                f"  sent by a rank {size(per_step)}/step{mean}; fp32 {size(fp32)} ({fp32 / per_step:.1f}x),"
                f" bf16 {size(bf16)} ({bf16 / per_step:.1f}x)"
            )
            lines += self._levels()
        else:
            lines.append("  one rank: nothing is sent, so nothing is compressed")
        if self.next_phase is not None:
            lines.append(f"  until step {self.next_phase}, where the compressor's next phase begins")
        if self.weights and plan.topology.num_peers > 1:
            lines += self._weights()
        if outer is not None:
            lines.append(f"  memory per rank: {size(memory.anchors)} for anchors and pseudo-gradients")
        lines += self._second_moment()
        lines.append(
            f"  memory per rank: {size(memory.residuals)} for residuals,"
            f" at most {size(self.buffer_nbytes)} for messages"
        )
        return "\n".join(lines)

    def _second_moment(self) -> list[str]:
        """Whether Adam's is corrected, where it matters, and what that costs."""
        plan = self.plan
        if plan.memory.squares:
            sent = step_nbytes(plan.state, "flat", "inter-node")
            return [
                f"  second moment: for Adam ranks exchange squares, {size(sent)}/step, and keep at most"
                f" {size(plan.memory.squares)} per rank"
            ]
        if plan.topology.num_peers == 1 or not few_bits(plan.assignments):
            return []
        why = "local steps" if plan.outer else "two levels" if plan.topology.node_size and not plan.scatter else ""
        if not why:
            return ["  second moment: left as it is; Adam needs more steps with so few bits (second_moment)"]
        return [f"  second moment: left as it is, because of {why} (second_moment)"]

    def _levels(self) -> list[str]:
        """What travels inside a node and what between nodes; nothing where there is one node."""
        plan, topology = self.plan, self.plan.topology
        if not topology.has_nodes:
            return []
        near, exact = plan.sent_nbytes - plan.between_nbytes, plan.intra_node_nbytes
        inside = f" and {size(exact)}/step of exact gradients" if exact else ""
        why = f"; one level, because {topology.obstacle or 'two_level=False'}" if topology.node_size is None else ""
        return [f"  between nodes {size(plan.between_nbytes)}/step, inside a node {size(near)}/step{inside}{why}"]

    def _weights(self) -> list[str]:
        """The way in use, modules whose weights cannot be coded and so travel exact, and the other ways."""
        used, *others = self.weights
        lines = [f"  weights: {used.render()}; {size(self.plan.sent_nbytes + used.step_nbytes)}/step in all"]
        exact = [name or "the model" for name, layout in self.plan.modules.items() if not layout.coded]
        if exact and self.plan.coding != Exact():
            named = ", ".join(exact[:3]) + (", ..." if len(exact) > 3 else "")
            lines.append(
                f"    not coded: {named} (parameters of several types, or that the module gathers in a way of its own)"
            )
        return lines + [f"    instead: {choice.render()}" for choice in others]


def build_report(sync: GradientSync) -> Report:
    """What an engine does from now on."""
    return report_of(sync.plan(), sync.compressor, device=sync.device, step_index=sync.step_index)


def report_of(plan: StepPlan, compressor: Compressor, *, device: torch.device, step_index: int = 0) -> Report:
    """Args:
    plan: Of the run.
    compressor: That the plan is of.
    device: Where kernels run.
    step_index: Optimizer steps completed.
    """
    groups: dict[tuple[str, str, str], Group] = {}
    for name, assignment in plan.assignments.items():
        spec = plan.specs[name]
        key = (assignment.kind, assignment.method.description(spec), assignment.reason)
        group = groups.setdefault(key, Group(*key))
        group.num_tensors += 1
        group.numel += spec.whole.numel
        group.sent_nbytes += assignment.method.wire_nbytes(spec, plan.topology.num_peers)
    codings = [] if plan.coding is None else [plan.coding, *(each for each in CHOICES if each != plan.coding)]
    return Report(
        plan=plan,
        groups=sorted(groups.values(), key=lambda group: -group.numel),
        weights=[_choice(plan, coding) for coding in codings],
        kernels=_kernels(plan.assignments, device),
        next_phase=_next_phase(compressor, step_index),
    )


def _kernels(assignments: Mapping[str, Assignment], device: torch.device) -> str:
    """Which implementation serves; on a GPU also which methods no kernel was written for."""
    compressed = [each.method for each in assignments.values() if each.kind == "compressed"]
    plain = sorted({method.label for method in compressed if not _has_kernels(method)})
    names = backends.describe(device)
    return f"{names}; plain PyTorch for {', '.join(plain)}" if plain and device.type == "cuda" else names


def _has_kernels(method: Method) -> bool:
    """Whether a GPU codes with kernels, and not with operations of PyTorch."""
    return isinstance(method, CodecPair) and method.uplink.in_one_pass and method.downlink.in_one_pass


def describe_ranks(topology: Topology) -> str:
    """Which ranks reduce what together."""
    if topology.node_size is None:
        return f"{topology.num_peers} ranks"
    return f"{topology.num_peers} groups of {topology.num_parts} ranks, exact inside a group"


def _next_phase(compressor: Compressor, step_index: int) -> int | None:
    """The first step with another configuration, if there is one among the next million."""
    now = compressor.phase(step_index)
    lengths = range(1, _LONGEST_PHASE)
    at = bisect.bisect_left(lengths, True, key=lambda length: compressor.phase(step_index + length) != now)
    return step_index + lengths[at] if at < len(lengths) else None


def size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError
