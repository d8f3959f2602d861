"""Reports what would be compressed: the script runs in one process until it prepares its model, and ends with the
report.

It needs no other processes and no memory for residuals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import wrapt
from accelerate import Accelerator
from torch import nn

from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.accelerate.supported import check_served
from lowbit_strategy.attach.prepare import checked, on_ranks
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.autoload import VARIABLE
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.config_file.section import plugin_from_section, read_config, section_of
from lowbit_strategy.control.base import labels
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.model.parameters import describe_parameters, is_float, named_parameters
from lowbit_strategy.plan.lines import lines
from lowbit_strategy.plan.plan import StepPlan, make_plan
from lowbit_strategy.plan.prepared import copies_residuals, extra_of
from lowbit_strategy.plan.reduced import ParamGroup, ddp_buckets
from lowbit_strategy.plan.startup_report import Report
from lowbit_strategy.ranks.topology import Topology, resolve_shard_size
from lowbit_strategy.run import run_script


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The planned run.

    Args:
        scatter: FSDP2 instead of DDP.
        world_size: Total number of processes on all machines.
        num_nodes: Machines, each with the same number of processes.
    """

    scatter: bool
    world_size: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.num_nodes:
            raise ValueError(
                f"{self.world_size} processes on {self.num_nodes} machines: the number is that of all machines"
                " together, and every machine must have the same number"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedReport(Report):
    """The report on a planned run, and its plan."""

    plan: StepPlan


def read_job(path: Path, num_processes: int | None = None) -> tuple[LowBitPlugin, Planned]:
    """Read the run that a configuration file of Accelerate describes.

    Args:
        path: The file.
        num_processes: Number of processes, in place of the file's.

    Raises:
        ValueError: The file has no section or a wrong one, or gradients of this kind of run cannot be compressed.
    """
    job = read_config(path)
    plugin = plugin_from_section(section_of(job, repr(str(path))))
    kind, fsdp, axes = str(job.get("distributed_type", "NO")), job.get("fsdp_config"), job.get("parallelism_config")
    sp_size = int(_mapping(axes).get("parallelism_config_sp_size") or 1)
    check_served(kind, fsdp_version=int(_mapping(fsdp).get("fsdp_version", 1)), sp_size=sp_size)
    world_size = num_processes or int(job.get("num_processes") or 1)
    return plugin, Planned(scatter=kind == "FSDP", world_size=world_size, num_nodes=int(job.get("num_machines") or 1))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def dry_run(job: tuple[LowBitPlugin, Planned], script: Sequence[str], *, module: bool = False) -> NoReturn:
    """Run a script until it prepares its model, and report.

    Args:
        job: The planned run.
        script: Its path and arguments.
        module: Whether it is the name of a module, as for ``python -m``.

    Raises:
        SystemExit: With status 0 after the report, or another status if the script ends earlier.
    """
    install(*job)
    os.environ.pop(VARIABLE, None)
    run_script(script[0], script[1:], module=module)
    print("lowbit doctor: the script ended without preparing a model: there is nothing to report", file=sys.stderr)
    raise SystemExit(1)


def plan(
    module: nn.Module,
    compressor: Compressor,
    planned: Planned,
    *,
    device: torch.device,
    options: SyncOptions = SyncOptions(),  # noqa: B008 (frozen)
) -> PlannedReport:
    """The plan and report that `prepare` and attaching would make for `module`.

    Args:
        module: The model, on any device, meta included.
        compressor: Configuration.
        planned: The run.
        device: Device of that run's gradients.
        options: All options except the compressor. Weights are assumed to be gathered in their own dtype, in forward
            and in backward. With local steps the report is about the steps after a synchronous part.

    Raises:
        ValueError, RuntimeError: The errors that `prepare` would raise on these nodes.
    """
    prepared = checked(module, compressor, options, scatter=planned.scatter)
    nodes = (planned.world_size // planned.num_nodes,) * planned.num_nodes
    topology = Topology(planned.world_size, nodes)
    shard_size = None if options.shard_size is None else resolve_shard_size(options.shard_size, topology)
    prepared = on_ranks(prepared, topology, shard_size)
    topology = prepared.topology
    chosen = Dense() if topology.num_peers == 1 else prepared.compressor
    chosen.check(prepared.specs)
    parts = topology.own_parts(prepared.specs, sharded=prepared.wrapper == "fsdp")
    modules, reduced = _layouts(module) if prepared.scatter else {}, list[ParamGroup]()
    if prepared.scatter:
        trained = {spec.name for spec in prepared.specs}
        for each in modules.values():
            if names := tuple(spec.name for spec in each.specs if spec.name in trained):
                reduced.append(ParamGroup(names, each.dtype.itemsize))
    else:
        itemsizes = {name: param.element_size() for name, param in named_parameters(module)}
        reduced = ddp_buckets((spec.name, spec.numel, itemsizes[spec.name]) for spec in prepared.specs)
    rule: Any = options.outer
    planned_run = make_plan(
        parts,
        assign_all(chosen.phase(0), parts),
        topology,
        prepared.wrapper,
        reduced=reduced,
        coding=prepared.weights,
        modules=modules,
        round_plan=None if rule is None else rule.planned(),
        extra=extra_of(prepared),
        copies=copies_residuals(prepared),
    )
    return PlannedReport(
        specs=planned_run.specs,
        assignments=planned_run.assignments,
        topology=topology,
        compressor=chosen,
        device=device,
        sharded=planned_run.sharded,
        in_rounds=planned_run.round_plan is not None,
        weights=planned_run.coding,
        modules=modules,
        planned=lines(planned_run),
        plan=planned_run,
    )


def _layouts(module: nn.Module) -> dict[str, ModuleLayout]:
    """All parameters of one dtype together, as if they were sharded together."""
    params = {name: param for name, param in named_parameters(module) if is_float(param)}
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in describe_parameters(module, params):
        by_dtype.setdefault(params[spec.name].dtype, []).append(spec)
    return {
        str(dtype): ModuleLayout(specs=tuple(specs), dtype=dtype, num_gathers=2) for dtype, specs in by_dtype.items()
    }


def install(plugin: LowBitPlugin, planned: Planned) -> None:
    """Let the script end with a report when it prepares its first model for training.

    Args:
        plugin: Configuration.
        planned: The run.
    """

    def prepare(wrapped: Callable[..., Any], instance: Accelerator, args: Any, kwargs: Any) -> Any:
        for model in args:
            if isinstance(model, nn.Module) and any(param.requires_grad for param in model.parameters()):
                _report(model, plugin, planned, instance.device)
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(Accelerator, "prepare", prepare)


def _report(model: nn.Module, plugin: LowBitPlugin, planned: Planned, device: torch.device) -> NoReturn:
    """Print the report, then exit with status 0."""
    print(f"dry run, nothing is trained: {type(model).__name__}")
    options, controller = plugin.sync_options(), plugin.controller
    levels = controller.levels if controller is not None else ()
    if not levels:
        print(plan(model, plugin.compressor, planned, device=device, options=options).render(), flush=True)
    for at, (level, label) in enumerate(zip(levels, labels(levels), strict=True)):
        print(f"level {at} of {type(controller).__name__}, {label}, if everything has it:")
        print(plan(model, level, planned, device=device, options=options).render(), flush=True)
    raise SystemExit(0)
