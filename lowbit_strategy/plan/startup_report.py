"""The start-up report: what is compressed, what is not and why, kernels, bytes and memory."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.inform import listed
from lowbit_strategy.kernels import backends
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.lines import describe_weights, lines_of
from lowbit_strategy.plan.mesh_dims import dims_of
from lowbit_strategy.ranks.ranks import Ranks
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Describes how one rank sends gradients and weights.

    Args:
        specs: The part of every parameter that this rank reduces.
        assignments: The method and kind of each parameter, and why.
        topology: The ranks.
        compressor: The compressor in use.
        device: Device of the kernels.
        sharded: Whether FSDP2 reduce-scatters gradients.
        in_rounds: Whether ranks meet in rounds and send pseudo-gradients.
        weights: The coding of FSDP2's weights; None under DDP.
        modules: The modules whose parameters FSDP2 gathers together.
        step_index: Optimizer steps completed.
        dims: The dims of the mesh, if it has several.
        planned: Lines about bytes and memory.
    """

    specs: Mapping[str, TensorSpec]
    assignments: Mapping[str, Assignment]
    topology: Topology
    compressor: Compressor
    device: torch.device
    sharded: bool
    in_rounds: bool
    weights: WeightCoding | None
    modules: Mapping[str, ModuleLayout]
    step_index: int = 0
    dims: str = ""
    planned: Sequence[str] = ()

    @property
    def groups(self) -> list[Group]:
        """Groups of compressed, high-precision and exempt parameters, the largest first."""
        groups: dict[tuple[str, str, str], Group] = {}
        for name, assignment in self.assignments.items():
            spec = self.specs[name]
            key = (assignment.kind, assignment.method.description(spec), assignment.reason)
            group = groups.setdefault(key, Group(*key))
            group.num_tensors += 1
            group.numel += spec.whole.numel
            group.sent_nbytes += assignment.method.wire_nbytes(spec, self.topology.num_peers)
        return sorted(groups.values(), key=lambda group: -group.numel)

    @property
    def kernels(self) -> str:
        """The backend of the kernels and, on a GPU, the methods without a kernel."""
        compressed = [each.method for each in self.assignments.values() if each.kind == "compressed"]
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
        what = "reduce-scatter" if self.sharded else "all-reduce"
        kind, period = ("pseudo-gradient", "round") if self.in_rounds else ("gradient", "step")
        lines = [f"lowbit_strategy: compressed {kind} {what} over {self.topology.label}, kernels: {self.kernels}"]
        lines += [f"  mesh: {self.dims}"] if self.dims else []
        for group in self.groups:
            lines.append(
                f"  {group.kind:<10} {group.num_tensors:>5} tensors {group.numel:>13,} elements"
                f" {size(group.sent_nbytes):>10}/{period}  {group.method} ({group.reason})"
            )
        if self.topology.num_peers == 1:
            lines.append("  one rank: nothing is sent, so nothing is compressed")
        if (step := self.next_phase) is not None:
            lines.append(f"  until step {step}, where the compressor's next phase begins")
        if self.weights is not None and self.topology.num_peers > 1:
            lines.append(f"  weights: {describe_weights(self.weights, self.modules)}")
            exact = [name or "the model" for name, layout in self.modules.items() if not layout.coded]
            if exact and self.weights != Exact():
                why = "parameters of several types, or that the module gathers in its own way"
                lines.append(f"    not coded: {listed(exact)} ({why})")
        return "\n".join([*lines, *self.planned])


def build_report(sync: GradientSync, ranks: Ranks | None = None) -> Report:
    """The report on the parameters that `ranks` reduce; None: the ranks that reduce most parameters."""
    ranks, ranks_of, weights = ranks or sync.ranks, sync.state.ranks_of, sync.weights
    specs = {name: spec for name, spec in sync.specs.items() if ranks_of(name) is ranks}
    modules = {} if weights is None else weights.layouts
    return Report(
        specs=specs,
        assignments={name: sync.state.assignments[name] for name in specs},
        topology=ranks.topology,
        compressor=sync.compressor,
        device=sync.device,
        sharded=sync.sharded,
        in_rounds=sync.rounds is not None and ranks.topology.num_peers > 1,
        weights=None if weights is None else weights.coding,
        modules={name: each for name, each in modules.items() if ranks_of(each.specs[0].name) is ranks},
        step_index=sync.step_index,
        dims=dims_of(sync, [each is ranks for each in sync.all_ranks].index(True)),
        planned=lines_of(sync, ranks),
    )


def render_reports(sync: GradientSync) -> str:
    """The reports of an engine, one for each group of ranks that reduces parameters."""
    return "\n".join(build_report(sync, ranks).render() for ranks in sync.all_ranks)


def _has_kernels(method: Method) -> bool:
    """Whether GPUs use kernels for it instead of PyTorch operations."""
    return isinstance(method, CodecPair) and method.uplink.in_one_pass and method.downlink.in_one_pass
