"""The start-up report without starting anything: no processes, no memory for residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lowbit_strategy.collectives.layout import dim0_cut
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.outer import OuterSync
from lowbit_strategy.engine.two_levels import announce_inside, inside_nbytes
from lowbit_strategy.engine.weights import ModuleLayout, WeightSync
from lowbit_strategy.hooks.attach import Prepared, checked_specs, make_engine, prepared_for, weights_of
from lowbit_strategy.hooks.sync_options import SyncOptions
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, is_float
from lowbit_strategy.ranks.ranks import Ranks, num_near, share_of
from lowbit_strategy.ranks.topology import Topology
from lowbit_strategy.telemetry.startup_report import Report, build_report

_META = torch.device("meta")


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

    @property
    def topology(self) -> Topology:
        return Topology((self.world_size // self.num_nodes,) * self.num_nodes, self.world_size)


def plan(
    module: nn.Module,
    compressor: Compressor,
    planned: Planned,
    *,
    device: torch.device,
    options: SyncOptions = SyncOptions(),  # noqa: B008 (frozen)
) -> Report:
    """What `prepare` and attaching would report for `module`.

    Args:
        module: On any device, meta included.
        compressor: Configuration.
        planned: The run.
        device: Where that run's gradients will be.
        options: Beside the compressor. Weights are taken to be gathered in their own type, in forward and in backward;
            of local steps the report is about those that come after a synchronous part.

    Raises:
        ValueError, RuntimeError: As `prepare` would on these nodes.
    """
    specs = checked_specs(module, compressor, options, scatter=planned.scatter)
    prepared = prepared_for(planned.topology, compressor, options, specs, scatter=planned.scatter)
    ranks = _ranks(prepared)
    sync = make_engine(prepared, ranks, _META, has_scaler=False)
    _announce_inside(sync, prepared, {canonical_name(name): p.element_size() for name, p in module.named_parameters()})
    if planned.scatter:
        coding, gathering = weights_of(prepared, ranks)
        sync.weights = WeightSync(coding, _layouts(module), gathering, _META)
    if options.outer is not None and sync.ranks.peers.world_size > 1:
        OuterSync(
            sync, {name: torch.empty(spec.shape, device=_META) for name, spec in sync.specs.items()}, options.outer
        )
    return build_report(sync, device)


def _ranks(prepared: Prepared) -> Ranks:
    """The first rank's."""
    topology, size = prepared.topology, prepared.shard_size or prepared.node_size
    world = _comm(range(topology.world_size), topology)
    if size is None:
        return Ranks.flat(world, topology)
    scatter = prepared.scatter and prepared.shard_size is None
    return Ranks(
        world=world,
        peers=_comm(range(0, topology.world_size, size), topology),
        intra_node=_comm(range(size), topology),
        share=share_of(0, size, topology.world_size, scatter=scatter),
        topology=topology,
    )


def _comm(members: Sequence[int], topology: Topology) -> LocalComm:
    comm = LocalComm(len(members))
    comm.num_near = num_near(members, topology, 0)
    return comm


def _announce_inside(sync: GradientSync, prepared: Prepared, itemsizes: Mapping[str, int]) -> None:
    """Exact sums inside nodes: bytes, and memory for messages as if all parameters were reduced as one."""
    if sync.ranks.share is None:
        return
    if not prepared.scatter:
        announce_inside(sync, itemsizes)
        return
    num_rows = prepared.shard_size or sync.ranks.world_size
    rows = {spec.name: dim0_cut(spec.shape, num_rows).row_numel for spec in prepared.specs}
    row_nbytes = sum(numel * itemsizes[name] for name, numel in rows.items())
    if prepared.shard_size is not None:
        sync.inside_nbytes, sync.inside_buffer_nbytes = (num_rows - 1) * row_nbytes, num_rows * row_nbytes
    else:
        sync.inside_nbytes, sync.inside_buffer_nbytes = inside_nbytes(sync, itemsizes), 2 * num_rows * row_nbytes


def _layouts(module: nn.Module) -> dict[str, ModuleLayout]:
    """All parameters of one type together, as if they were sharded as one."""
    params = {canonical_name(name): param for name, param in module.named_parameters() if is_float(param)}
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in describe_parameters(module, params):
        by_dtype.setdefault(params[spec.name].dtype, []).append(spec)
    return {
        str(dtype): ModuleLayout(specs=tuple(specs), dtype=dtype, num_gathers=2) for dtype, specs in by_dtype.items()
    }
