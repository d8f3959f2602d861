"""How much memory compression may keep on this machine's devices, and what is chosen for it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from lowbit_strategy.attach.prepare import PreparedModel
from lowbit_strategy.hooks.weights import module_layouts
from lowbit_strategy.inform import inform
from lowbit_strategy.methods.weights import WeightCoding
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.fitting import MemoryOption, Setup, allowed_nbytes, choose, enough_gb, memory_options
from lowbit_strategy.ranks.ranks import Ranks


def fit_to_memory(
    prepared: PreparedModel,
    weights: WeightCoding | None,
    ranks: Ranks,
    device: torch.device,
    sharded: nn.Module | None = None,
) -> PreparedModel:
    """`prepared` adjusted to the memory limit, the same on every rank; unchanged without a limit.

    Args:
        prepared: As asked for.
        weights: How FSDP2's weights travel.
        ranks: That train the model.
        device: Of gradients.
        sharded: The model under FSDP2.

    Raises:
        ValueError: Nothing fits.
    """
    if ranks.alone or (prepared.options.memory is None and device.type != "cuda"):
        return prepared
    shards = {"ddp": 1, "fsdp": ranks.shape.world_size, "hsdp": prepared.shard_size or 1}[prepared.layout]
    own_numel = sum(spec.numel for spec in prepared.specs) // shards
    room, limit = room_for(prepared.options.memory, device, ranks, own_numel)
    assert room is not None
    setup = Setup(
        specs=prepared.specs,
        shape=ranks.shape,
        layout=prepared.layout,
        modules={} if sharded is None else module_layouts(sharded),
        squares=prepared.exchanges_squares,
    )
    options = prepared.options
    may = {"may_recode": options.weights is None, "may_uncorrect": options.second_moment is None}
    found = list(memory_options(prepared.compressor, weights, setup, **may))
    chosen = choose(found, room, limit)
    if chosen.differs and ranks.world.rank == 0:
        _announce(chosen, [way for way in found if way.compressor == prepared.compressor], room)
    if chosen.weights != weights:
        options = replace(options, weights=chosen.weights)
    if setup.squares and not chosen.squares:
        options = replace(options, second_moment=False)
    return replace(prepared, compressor=chosen.compressor, options=options)


def _announce(chosen: MemoryOption, unchanged: Sequence[MemoryOption], room_nbytes: int) -> None:
    """`unchanged`: the choices with the requested compressor."""
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
    """Bytes that compression should keep within, and those that it must, on the rank that has least; None: no limit.

    `own_numel`: elements whose gradients and optimizer state have not been allocated yet.
    """
    if memory is not None:
        return int(memory * 1e9), int(memory * 1e9)
    if device.type != "cuda":
        return None, 0
    free, total = torch.cuda.mem_get_info(device)
    least = torch.tensor([allowed_nbytes(total, free, own_numel), free], dtype=torch.int64, device=device)
    ranks.world.all_reduce(least, dist.ReduceOp.MIN).wait()
    room, limit = least.tolist()
    return room, limit
