"""The start-up report without starting anything: no processes, no memory for residuals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from lowbit_strategy.attach.attach import used_compressor, weight_coding
from lowbit_strategy.attach.prepare import Prepared, checked_specs, prepared_for
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, is_float
from lowbit_strategy.plan.gradients import ParamGroup, ddp_buckets
from lowbit_strategy.plan.plan import make_plan
from lowbit_strategy.plan.weights import ModuleLayout
from lowbit_strategy.ranks.ranks import Shape, share_of
from lowbit_strategy.ranks.topology import Topology
from lowbit_strategy.telemetry.startup_report import Report, report_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The run that is planned, as ``ddp:8`` or, on two nodes of four, ``fsdp:2x4`` on command lines.

    Args:
        scatter: FSDP2 instead of DDP.
        world_size: Processes in all, over all machines.
        num_nodes: Machines, each with as many processes.
    """

    scatter: bool
    world_size: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        if self.world_size % self.num_nodes:
            raise ValueError(
                f"{self.world_size} processes on {self.num_nodes} machines: the numbers given are of all machines"
                " together, and every machine has to have as many"
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
    topology = Topology(nodes, planned.world_size)
    prepared = prepared_for(topology, compressor, options, specs, scatter=planned.scatter)
    shape = _shape(prepared, far=far)
    chosen = used_compressor(prepared, shape)
    chosen.check(prepared.specs)
    parts = [spec.shared(shape.share) for spec in prepared.specs]
    itemsizes = {canonical_name(name): param.element_size() for name, param in module.named_parameters()}
    if prepared.scatter:
        reduced = _as_one(prepared, itemsizes)
    else:
        reduced = ddp_buckets((spec.name, spec.numel, itemsizes[spec.name]) for spec in prepared.specs)
    planned_run = make_plan(
        parts,
        assign_all(chosen.phase(0), parts),
        shape,
        prepared.layout,
        reduced=reduced,
        coding=weight_coding(prepared) if prepared.scatter else None,
        modules=_layouts(module) if prepared.scatter else None,
        outer=prepared.options.outer,
    )
    return report_of(planned_run, chosen, device=device)


def _shape(prepared: Prepared, *, far: bool) -> Shape:
    topology, size = prepared.topology, prepared.shard_size or prepared.node_size
    scatter = prepared.scatter and prepared.shard_size is None
    share = None if size is None else share_of(0, size, topology.world_size, scatter=scatter)
    return Shape(topology.world_size, 0, share, topology, far and topology.num_nodes > 1)


def _as_one(prepared: Prepared, itemsizes: Mapping[str, int]) -> list[ParamGroup]:
    """All parameters of one type together, as if they were sharded as one."""
    by_size: dict[int, list[str]] = {}
    for spec in prepared.specs:
        by_size.setdefault(itemsizes[spec.name], []).append(spec.name)
    return [ParamGroup(tuple(names), size) for size, names in by_size.items()]


def _layouts(module: nn.Module) -> dict[str, ModuleLayout]:
    """All parameters of one type together, as if they were sharded as one."""
    params = {canonical_name(name): param for name, param in module.named_parameters() if is_float(param)}
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in describe_parameters(module, params):
        by_dtype.setdefault(params[spec.name].dtype, []).append(spec)
    return {
        str(dtype): ModuleLayout(specs=tuple(specs), dtype=dtype, num_gathers=2) for dtype, specs in by_dtype.items()
    }
