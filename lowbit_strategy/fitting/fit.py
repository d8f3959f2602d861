"""Adjusts a set-up to the available memory."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
import torch.distributed as dist

from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.fitting.memory import Memory
from lowbit_strategy.fitting.ways import MemoryOption, Setup, choose, enough_gb, memory_options
from lowbit_strategy.inform import inform
from lowbit_strategy.model.module_layout import ModuleLayout
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.prepared import copies_residuals, extra_of, without_extra
from lowbit_strategy.ranks.ranks import Ranks

_PENDING_NBYTES = 12  # bytes per own element still needed after set-up: a gradient and Adam's two averages


class MemoryLimit(Part):
    """Fits a set-up to the memory that compression may use: the chosen amount, or the result of `room_for`."""

    def __init__(self, options: SyncOptions) -> None:
        self._memory = options.memory

    def check_options(self, options: Any) -> None:
        if self._memory is not None and not self._memory > 0:
            raise ValueError(f"memory must be a positive number of GB or None, got {self._memory!r}")

    def fitted(
        self, prepared: PreparedModel, ranks: Ranks, device: torch.device, modules: Mapping[str, ModuleLayout]
    ) -> PreparedModel:
        """Unchanged without a limit."""
        if self._memory is None and device.type != "cuda":
            return prepared
        shards = {"ddp": 1, "fsdp": ranks.topology.world_size, "hsdp": ranks.topology.num_parts}[prepared.wrapper]
        own_numel = sum(spec.numel for spec in prepared.specs) // shards
        room, limit = room_for(self._memory, device, ranks, own_numel)
        assert room is not None
        setup = Setup(
            specs=prepared.specs,
            topology=ranks.topology,
            wrapper=prepared.wrapper,
            modules=modules,
            extra=extra_of(prepared),
            copies=copies_residuals(prepared),
        )
        options, weights = prepared.options, prepared.weights
        own = memory_options(prepared.compressor, weights, setup, may_recode=options.weights is None)
        found = _where_most_is_kept(list(own), ranks)
        chosen = choose(found, room, limit)
        if chosen.differs and ranks.everyone.rank == 0:
            _announce(chosen, [way for way in found if way.compressor == prepared.compressor], room)
        if chosen.extra is not setup.extra:
            prepared = replace(prepared, parts=without_extra(prepared))
        if chosen.weights != weights:
            options = replace(options, weights=chosen.weights)
        if setup.copies and not chosen.copies:
            options = replace(options, rollback=False)
        return replace(prepared, compressor=chosen.compressor, options=options)


def _where_most_is_kept(own: Sequence[MemoryOption], ranks: Ranks) -> list[MemoryOption]:
    """The options with the largest memory for each purpose on any rank that holds a part of the model, since parts may
    be uneven and all ranks must choose the same.
    """
    everyone = gathered([astuple(each.memory) for each in own], ranks.everyone.group)
    most = (Memory(*map(max, zip(*of_ranks, strict=True))) for of_ranks in zip(*everyone, strict=False))
    return [replace(each, memory=memory) for each, memory in zip(own, most, strict=False)]


def _announce(chosen: MemoryOption, unchanged: Sequence[MemoryOption], room_nbytes: int) -> None:
    """Log the choice. `unchanged`: the choices with the requested compressor."""
    if chosen not in unchanged:
        smallest = min(unchanged, key=lambda way: way.memory.total)
        warnings.warn(
            f"{smallest.compressor.name} runs without its residual, which does not fit: to keep it give"
            f" memory={enough_gb(smallest)}, or divide it with HSDP (shard_size='node') or nodes of several ranks",
            stacklevel=3,
        )
    allowed, arithmetic = size(room_nbytes), chosen.arithmetic()
    inform("to fit into %s of memory, %s: %s. Cost: %s", allowed, chosen.differs, arithmetic, chosen.costs)


def room_for(memory: float | None, device: torch.device, ranks: Ranks, own_numel: int = 0) -> tuple[int | None, int]:
    """The bytes that compression should not exceed, and those that it must not exceed, on the rank with the least
    memory; None: no limit.

    `own_numel`: elements whose gradients and optimizer state have not been allocated yet.
    """
    if memory is not None:
        return int(memory * 1e9), int(memory * 1e9)
    if device.type != "cuda":
        return None, 0
    free, total = torch.cuda.mem_get_info(device)
    least = torch.tensor([allowed_nbytes(total, free, own_numel), free], dtype=torch.int64, device=device)
    ranks.everyone.all_reduce(least, dist.ReduceOp.MIN).wait()
    room, limit = least.tolist()
    return room, limit


def allowed_nbytes(total_nbytes: int, free_nbytes: int, own_numel: int) -> int:
    """The memory that compression may use on a GPU unless `memory=` is given: half of what will be free, leaving the
    other half for activations, but at least an eighth and at most a quarter of the memory.

    Args:
        total_nbytes: Memory of the GPU.
        free_nbytes: Free memory of the GPU once parameters are on it.
        own_numel: Trained elements whose gradients and optimizer state this rank will hold.
    """
    left = (free_nbytes - _PENDING_NBYTES * own_numel) // 2
    return min(total_nbytes // 4, max(total_nbytes // 8, left))
