"""What would be compressed, and how long a step would take: the script runs in one process until it prepares its model.

No processes, no memory for residuals. The script ends with the report; where its steps are to be predicted too and how
long it computes is not given, after a few steps.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import wrapt
from accelerate import Accelerator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.advisor import units
from lowbit_strategy.advisor.clocks import OptimizerClock, measure_coding
from lowbit_strategy.advisor.cluster import Cluster
from lowbit_strategy.advisor.cost import step_time
from lowbit_strategy.advisor.inputs import INSIDE, LATENCY, cluster_of, is_far
from lowbit_strategy.advisor.workload import uncompressed
from lowbit_strategy.attach.attach import used_compressor, weight_coding
from lowbit_strategy.attach.prepare import checked_specs, prepared_for
from lowbit_strategy.attach.strategy_options import SyncOptions
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.control.base import labels
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, is_float
from lowbit_strategy.plan.gradients import ParamGroup, ddp_buckets
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.weights import ModuleLayout
from lowbit_strategy.ranks.topology import Topology
from lowbit_strategy.telemetry.startup_report import Report

_WARM_STEPS, _TIMED_STEPS = 2, 5


@dataclass(frozen=True, slots=True)
class Linked:
    """The link that a run is planned for, as users write it, checked.

    Args:
        link: Bandwidth of a machine.
        latency: Between machines, one way.
        compute: A step without communication; empty: it is to be timed.
    """

    link: str
    latency: str
    compute: str

    @classmethod
    def of(cls, link: str, latency: str | None = None, compute: str | None = None) -> Linked:
        """Raises:
        ValueError: One is no quantity.
        """
        found = cls(link, latency or LATENCY, compute or "")
        cluster_of({"link": found.link, "latency": found.latency})
        if found.compute:
            units.duration(found.compute)
        return found

    def __str__(self) -> str:
        return ",".join((self.link, self.latency, self.compute))

    @classmethod
    def parse(cls, text: str) -> Linked:
        """What `str` gives.

        Raises:
            ValueError: One is no quantity.
        """
        return cls.of(*text.split(",")[:3])

    def is_far(self, device: torch.device) -> bool:
        """Whether ranks let all messages between machines travel at once, as they do on CPU."""
        return self._is_here(device) and is_far(units.duration(self.latency))

    def _is_here(self, device: torch.device) -> bool:
        """Whether devices of the run are like this one, a CPU: where computing is not given, they are taken to be."""
        return device.type == "cpu" and not self.compute

    def cluster(self, compressor: Compressor, device: torch.device) -> Cluster:
        """The links, and how fast devices code: measured here, but of GPUs assumed where computing is given."""
        links, _ = cluster_of({"link": self.link, "latency": self.latency}, on_cpu=self._is_here(device))
        if self.compute:
            return links
        return replace(links, coding=measure_coding(compressor.phase(0), device))

    def predict(self, plan: StepPlan, cluster: Cluster, compute_s: float, optimizer_s: float = 0.0) -> str:
        """A line for a report."""
        ours = step_time(plan, cluster, compute_s, optimizer_s)
        plain, half = (step_time(uncompressed(plan, size), cluster, compute_s, optimizer_s) for size in (4, 2))
        sources = f"given; assumed: GPUs, {cluster.coding}, {INSIDE} inside a node"
        if not self.compute:
            sources = (
                f"{optimizer_s:.3g} s of it the optimizer, and {cluster.coding}, measured here; assumed: {INSIDE}"
                " inside a node"
            )
        return (
            f"  predicted on links of {self.link} and {self.latency}: a step takes {ours.seconds:.3g} s"
            f" ({ours.low:.3g} to {ours.high:.3g}); without compression {plain.seconds:.3g} s in float32,"
            f" {half.seconds:.3g} s in bf16\n"
            f"  computing takes {compute_s:.3g} s, {sources}"
        )


def time_steps(done: Callable[[float, float], None], device: torch.device) -> None:
    """Time the script's steps, then call `done`, once, with the seconds of one and those of the optimizer in it."""
    clock = OptimizerClock(device)
    ends: list[float] = []
    optimizer_s: list[float] = []

    def stepped(*_: Any) -> None:
        ends.append(time.perf_counter())
        optimizer_s.append(clock.take())
        if len(ends) > _WARM_STEPS + _TIMED_STEPS:
            handle.remove()
            step_s = statistics.median(b - a for a, b in itertools.pairwise(ends[_WARM_STEPS:]))
            done(step_s, statistics.median(optimizer_s[-_TIMED_STEPS:]))

    handle = register_optimizer_step_post_hook(stepped)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The run that is planned, as ``ddp:8`` or, on two nodes of four, ``fsdp:2x4`` on command lines.

    Args:
        scatter: FSDP2 instead of DDP.
        world_size: Processes in all, over all machines.
        num_nodes: Machines, each with the same number of processes.
    """

    scatter: bool
    world_size: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.num_nodes:
            raise ValueError(
                f"{self.world_size} processes on {self.num_nodes} machines: the numbers given are of all machines"
                " together, and every machine has to have the same number"
            )

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{'fsdp' if self.scatter else 'ddp'}:{nodes}{self.world_size // self.num_nodes}"

    @classmethod
    def parse(cls, text: str) -> Planned:
        """Raises:
        ValueError: Not of that form.
        """
        kind, _, shape = text.partition(":")
        nodes, times, each = shape.rpartition("x")
        numbers = [nodes, each] if times else ["1", each]
        if kind not in ("ddp", "fsdp") or not all(number.isdigit() and int(number) for number in numbers):
            raise ValueError(
                f"a dry run is given as ddp:<processes> or fsdp:<processes>, or <nodes>x<processes>, got {text!r}"
            )
        num_nodes, per_node = map(int, numbers)
        return cls(scatter=kind == "fsdp", world_size=num_nodes * per_node, num_nodes=num_nodes)


def plan(
    module: nn.Module,
    compressor: Compressor,
    planned: Planned,
    *,
    device: torch.device,
    options: SyncOptions = SyncOptions(),  # noqa: B008 (frozen)
    far: bool = False,
) -> Report:
    """What `prepare` and attaching would report for `module`.

    Args:
        module: On any device, meta included.
        compressor: Configuration.
        planned: The run.
        device: Where that run's gradients will be.
        options: Beside the compressor. Weights are taken to be gathered in their own type, in forward and in backward;
            of local steps the report is about those that come after a synchronous part.
        far: Whether messages between machines take so long that all are to travel at once.

    Raises:
        ValueError, RuntimeError: As `prepare` would on these nodes.
    """
    specs = checked_specs(module, compressor, options, scatter=planned.scatter)
    nodes = (planned.world_size // planned.num_nodes,) * planned.num_nodes
    prepared = prepared_for(Topology(planned.world_size, nodes), compressor, options, specs, scatter=planned.scatter)
    node_size = prepared.shard_size or prepared.node_size
    far = far and planned.num_nodes > 1
    topology = replace(prepared.topology, node_size=node_size, far=far, intra=options.intra)
    chosen = used_compressor(prepared, topology)
    chosen.check(prepared.specs)
    parts = topology.own_parts(prepared.specs, sharded=prepared.layout == "fsdp")
    modules, reduced = _layouts(module) if prepared.scatter else {}, list[ParamGroup]()
    if prepared.scatter:
        trained = {spec.name for spec in prepared.specs}
        for each in modules.values():
            if names := tuple(spec.name for spec in each.specs if spec.name in trained):
                reduced.append(ParamGroup(names, each.dtype.itemsize))
    else:
        itemsizes = {canonical_name(name): param.element_size() for name, param in module.named_parameters()}
        reduced = ddp_buckets((spec.name, spec.numel, itemsizes[spec.name]) for spec in prepared.specs)
    planned_run = make_plan(
        parts,
        assign_all(chosen.phase(0), parts),
        topology,
        prepared.layout,
        reduced=reduced,
        coding=weight_coding(prepared) if prepared.scatter else None,
        modules=modules,
        outer=prepared.options.outer,
    )
    return Report(planned_run, chosen, device)


def _layouts(module: nn.Module) -> dict[str, ModuleLayout]:
    """All parameters of one type together, as if they were sharded as one."""
    params = {canonical_name(name): param for name, param in module.named_parameters() if is_float(param)}
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in describe_parameters(module, params):
        by_dtype.setdefault(params[spec.name].dtype, []).append(spec)
    return {
        str(dtype): ModuleLayout(specs=tuple(specs), dtype=dtype, num_gathers=2) for dtype, specs in by_dtype.items()
    }


class DryRun:
    """Ends the script with a report when it prepares its first model that is to be trained.

    Args:
        plugin: Configuration.
        planned: The run.
        linked: The links that its steps are to be predicted for; None: they are not.
    """

    def __init__(self, plugin: LowBitPlugin, planned: Planned, linked: Linked | None = None) -> None:
        self.plugin = plugin
        self.planned = planned
        self.linked = linked
        self._times = False  # steps, to the end of which the script runs

    def install(self) -> None:
        """Once per process, before the script runs."""
        wrapt.wrap_function_wrapper(Accelerator, "prepare", self._prepare)

    def _prepare(self, wrapped: Callable[..., Any], instance: Accelerator, args: Any, kwargs: Any) -> Any:
        for model in args:
            if self._times or not isinstance(model, nn.Module):
                continue
            if any(param.requires_grad for param in model.parameters()):
                linked, device = self.linked, instance.device
                if linked is None or linked.compute:
                    self._report(model, device, units.duration(linked.compute) if linked is not None else None)
                self._times = True
                time_steps(partial(self._report, model, device), device)
        return wrapped(*args, **kwargs)

    def _report(
        self, model: nn.Module, device: torch.device, compute_s: float | None, optimizer_s: float = 0.0
    ) -> NoReturn:
        """Raises:
        SystemExit: With status 0, after the report.
        """
        timed = " but a few steps in this process" if self._times else ""
        print(f"dry run, nothing is trained{timed}: {type(model).__name__}")
        controller = self.plugin.controller
        levels = controller.levels if controller is not None else ()
        if not levels:
            print(self._plan(model, self.plugin.compressor, device, compute_s, optimizer_s), flush=True)
        for at, (level, label) in enumerate(zip(levels, labels(levels), strict=True)):
            print(f"level {at} of {type(controller).__name__}, {label}, if everything has it:")
            print(self._plan(model, level, device, compute_s, optimizer_s), flush=True)
        raise SystemExit(0)

    def _plan(
        self,
        model: nn.Module,
        compressor: Compressor,
        device: torch.device,
        compute_s: float | None,
        optimizer_s: float,
    ) -> str:
        options = self.plugin.sync_options()
        linked = self.linked
        far = linked is not None and linked.is_far(device)
        report = plan(model, compressor, self.planned, device=device, options=options, far=far)
        if linked is None or compute_s is None:
            return report.render()
        cluster = linked.cluster(compressor, device)
        return f"{report.render()}\n{linked.predict(report.plan, cluster, compute_s, optimizer_s)}"

    def finish(self) -> None:
        """Raises:
        SystemExit: The script ended without preparing a model, or before enough of its steps were timed.
        """
        if self._times:
            text = "the script ended before its steps could be timed: give --compute"
        else:
            text = "the script ended without preparing a model: there is nothing to report"
        print(f"lowbit: {text}", file=sys.stderr)
        raise SystemExit(1)
