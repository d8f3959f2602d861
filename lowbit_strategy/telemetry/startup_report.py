"""The start-up report: what is compressed, what is not and why, bytes, memory, kernels."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels import backends
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.methods.weights.registry import CHOICES
from lowbit_strategy.plan.plan import Plan
from lowbit_strategy.ranks.shape import Shape

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
        between = "" if self.between_nbytes is None else f" ({_size(self.between_nbytes)} between nodes)"
        memory = f"{_size(self.kept_nbytes)} of memory per rank" if self.kept_nbytes else "no more memory than FSDP2's"
        return f"{self.label}, {_size(self.step_nbytes)}/step{between}, {memory}"


@dataclass(frozen=True, slots=True)
class WeightReport:
    """The way in use, the others that `CHOICES` has, and modules whose weights cannot be coded and so travel exact."""

    used: WeightChoice
    others: tuple[WeightChoice, ...]
    exact_modules: tuple[str, ...] = ()

    def render(self, sent_nbytes: int) -> list[str]:
        """Lines of the report. `sent_nbytes`: of gradients per step."""
        lines = [f"  weights: {self.used.render()}; {_size(sent_nbytes + self.used.step_nbytes)}/step in all"]
        if self.exact_modules:
            named = ", ".join(self.exact_modules[:3]) + (", ..." if len(self.exact_modules) > 3 else "")
            lines.append(
                f"    not coded: {named} (parameters of several types, or that the module gathers in a way of its own)"
            )
        return lines + [f"    instead: {choice.render()}" for choice in self.others]


def _weight_report(plan: Plan) -> WeightReport | None:
    if plan.coding is None:
        return None
    choices = (plan.coding, *(choice for choice in CHOICES if choice != plan.coding))
    used, *others = (_choice(plan, choice) for choice in choices)
    exact = [name or "the model" for name, layout in plan.modules.items() if not layout.coded]
    return WeightReport(used, tuple(others), () if plan.coding == Exact() else tuple(exact))


def _choice(plan: Plan, coding: WeightCoding) -> WeightChoice:
    again = any(layout.num_gathers > 1 for layout in plan.modules.values())  # or FSDP2 frees nothing after forward
    kept = {
        "nothing": "gathered anew in backward" if again else "sent once, as FSDP2 keeps them until backward",
        "codes": "kept as codes",
        "replica": "kept as a replica",
    }
    ours = coding != Exact()
    return WeightChoice(
        f"{coding.label}, {kept[coding.keep]}",
        plan.weights_nbytes(coding),
        plan.weights_memory(coding),
        plan.weights_leaving_nbytes(coding) if plan.shape.has_nodes and ours else None,
    )


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank sends in each step.

    Args:
        groups: Compressed, high precision and exempt, largest first.
        sent_nbytes: Bytes this rank sends to others per step.
        fp32_nbytes, bf16_nbytes: The same for an uncompressed ring of that type.
        residual_nbytes: Memory for residuals on this rank.
        buffer_nbytes: Memory for messages on this rank, and for coding them where no kernel does, at most.
        weights: How FSDP2's weights travel, and what other ways would cost; None under DDP.
        ranks: Which ranks reduce what together, in words.
        between_nbytes: Of `sent_nbytes`, what leaves the node. None: it is not known.
        inside_nbytes: Bytes of gradients that travel inside a node besides, exact, where ranks have two levels.
        one_level: Why ranks have one level only; None if they have two or if it makes no difference.
        kernels: Which implementation serves.
        outer: The rule of local steps in a few words; empty: every step is synchronised.
        every: Optimizer steps of a round, in which all of `sent_nbytes` is sent; 1 without local steps.
        outer_nbytes: Memory on this rank for anchors, a pseudo-gradient and the outer optimizer once it has stepped.
        second_moment_nbytes: Memory on this rank for Adam's second moment, where it is made of ranks' squares.
        next_phase: Step in which the compressor changes its configuration, as at the end of a warm-up; None: never.
    """

    groups: list[Group] = field(default_factory=list)
    sent_nbytes: int = 0
    fp32_nbytes: int = 0
    bf16_nbytes: int = 0
    residual_nbytes: int = 0
    buffer_nbytes: int = 0
    weights: WeightReport | None = None
    ranks: str = ""
    between_nbytes: int | None = None
    inside_nbytes: int = 0
    one_level: str | None = None
    kernels: str = ""
    world_size: int = 1
    scatter: bool = False
    outer: str = ""
    every: int = 1
    outer_nbytes: int = 0
    second_moment_nbytes: int = 0
    next_phase: int | None = None

    def render(self) -> str:
        what = "reduce-scatter" if self.scatter else "all-reduce"
        kind, period = ("pseudo-gradient", "round") if self.outer else ("gradient", "step")
        lines = [f"lowbit_strategy: compressed {kind} {what} over {self.ranks}, kernels: {self.kernels}"]
        for group in self.groups:
            lines.append(
                f"  {group.kind:<10} {group.num_tensors:>5} tensors {group.numel:>13,} elements"
                f" {_size(group.sent_nbytes):>10}/{period}  {group.method} ({group.reason})"
            )
        if self.sent_nbytes:
            per_step, mean = self.sent_nbytes / self.every, ""
            ratio32, ratio16 = self.fp32_nbytes / per_step, self.bf16_nbytes / per_step
            if self.outer:
                lines.append(f"  {self.outer}: a rank sends {_size(self.sent_nbytes)} per round of {self.every} steps")
                mean = " in the mean"
            lines.append(
                f"  sent by a rank {_size(per_step)}/step{mean}; fp32 {_size(self.fp32_nbytes)} ({ratio32:.1f}x),"
                f" bf16 {_size(self.bf16_nbytes)} ({ratio16:.1f}x)"
            )
            lines += self._levels()
        else:
            lines.append("  one rank: nothing is sent, so nothing is compressed")
        if self.next_phase is not None:
            lines.append(f"  until step {self.next_phase}, where the compressor's next phase begins")
        if self.weights is not None and self.world_size > 1:
            lines += self.weights.render(self.sent_nbytes)
        if self.outer:
            lines.append(f"  memory per rank: {_size(self.outer_nbytes)} for anchors and pseudo-gradients")
        if self.second_moment_nbytes:
            lines.append(f"  memory per rank: at most {_size(self.second_moment_nbytes)} for Adam's second moment")
        lines.append(
            f"  memory per rank: {_size(self.residual_nbytes)} for residuals,"
            f" at most {_size(self.buffer_nbytes)} for messages"
        )
        return "\n".join(lines)

    def _levels(self) -> list[str]:
        """What travels inside a node and what between nodes; nothing where there is one node."""
        if self.between_nbytes is None:
            return []
        near = self.sent_nbytes - self.between_nbytes
        besides = f" and {_size(self.inside_nbytes)}/step of exact gradients" if self.inside_nbytes else ""
        why = f"; one level, because {self.one_level}" if self.one_level else ""
        return [f"  between nodes {_size(self.between_nbytes)}/step, inside a node {_size(near)}/step{besides}{why}"]


def build_report(sync: GradientSync) -> Report:
    """What an engine does from now on."""
    return report_of(sync.plan(), sync.compressor, device=sync.device, step_index=sync.step_index)


def report_of(plan: Plan, compressor: Compressor, *, device: torch.device, step_index: int = 0) -> Report:
    """Args:
    plan: Of the run.
    compressor: That the plan is of.
    device: Where kernels run.
    step_index: Optimizer steps completed.
    """
    groups: dict[tuple[str, str, str], Group] = {}
    for name, assignment in plan.assignments.items():
        key = (assignment.kind, assignment.method.description(scatter=plan.scatter), assignment.reason)
        group = groups.setdefault(key, Group(*key))
        group.num_tensors += 1
        group.numel += plan.specs[name].whole.numel
        group.sent_nbytes += plan.parameter_nbytes(name)
    shape = plan.shape
    obstacle = None if shape.topology is None else shape.topology.obstacle
    return Report(
        groups=sorted(groups.values(), key=lambda group: -group.numel),
        sent_nbytes=plan.sent_nbytes,
        fp32_nbytes=plan.uncompressed_nbytes(4),
        bf16_nbytes=plan.uncompressed_nbytes(2),
        residual_nbytes=plan.memory.residuals,
        buffer_nbytes=plan.memory.messages + plan.memory.working,
        weights=_weight_report(plan),
        ranks=describe_ranks(shape),
        between_nbytes=plan.between_nbytes if shape.has_nodes else None,
        inside_nbytes=plan.intra_node_nbytes,
        one_level=(obstacle or "two_level=False") if shape.has_nodes and shape.share is None else None,
        kernels=_kernels(plan.assignments, device),
        world_size=shape.num_peers,
        scatter=plan.scatter,
        outer="" if plan.outer is None else plan.outer.label,
        every=plan.every,
        outer_nbytes=plan.memory.anchors,
        second_moment_nbytes=plan.memory.squares,
        next_phase=_next_phase(compressor, step_index),
    )


def _kernels(assignments: Mapping[str, Assignment], device: torch.device) -> str:
    """Which implementation serves; on a GPU also which methods no kernel was written for."""
    compressed = [each.method for each in assignments.values() if each.kind == "compressed"]
    plain = sorted({method.label for method in compressed if not has_kernels(method)})
    names = backends.describe(device)
    return f"{names}; plain PyTorch for {', '.join(plain)}" if plain and device.type == "cuda" else names


def has_kernels(method: Method) -> bool:
    """Whether a GPU codes with kernels, and not with operations of PyTorch."""
    if not isinstance(method, CodecPair):
        return False
    return method.uplink.in_one_pass and method.downlink.in_one_pass


def describe_ranks(shape: Shape) -> str:
    """Which ranks reduce what together."""
    if shape.share is None:
        return f"{shape.num_peers} ranks"
    return f"{shape.num_peers} groups of {shape.num_parts} ranks, exact inside a group"


def _next_phase(compressor: Compressor, step_index: int) -> int | None:
    """The first step with another configuration, if there is one among the next million."""
    now = compressor.phase(step_index)
    lengths = range(1, _LONGEST_PHASE)
    at = bisect.bisect_left(lengths, True, key=lambda length: compressor.phase(step_index + length) != now)
    return step_index + lengths[at] if at < len(lengths) else None


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    raise AssertionError
