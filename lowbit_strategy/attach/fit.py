"""How much memory compression may keep on this machine's devices, and what is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist

from lowbit_strategy.attach.prepare import Prepared
from lowbit_strategy.inform import inform
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.options.sizes import size
from lowbit_strategy.plan.fitting import SHARE_OF_DEVICE, Setup, choices, choose
from lowbit_strategy.plan.weights import ModuleLayout
from lowbit_strategy.ranks.ranks import Ranks


def fitted(
    prepared: Prepared,
    weights: WeightCoding | None,
    ranks: Ranks,
    device: torch.device,
    modules: Mapping[str, ModuleLayout] | None = None,
) -> Prepared:
    """`prepared` with what fits, on all ranks alike; as it is where nothing limits the memory.

    Raises:
        ValueError: Nothing fits.
    """
    room, limit = room_for(prepared.options.memory, device, ranks)
    if room is None or ranks.alone:
        return prepared
    setup = Setup(
        specs=prepared.specs,
        shape=ranks.shape,
        layout=prepared.layout,
        modules=modules or {},
        squares=prepared.options.second_moment and prepared.options.outer is None,
    )
    found = choices(prepared.compressor, weights, setup, may_recode=prepared.options.weights is None)
    chosen = choose(list(found), room, limit)
    if chosen.differs and ranks.world.rank == 0:
        inform(
            "to fit into %s of memory, %s: %s. Cost: %s",
            size(room),
            chosen.differs,
            chosen.arithmetic(),
            chosen.costs,
        )
    options = prepared.options if chosen.weights == weights else replace(prepared.options, weights=chosen.weights)
    return replace(prepared, compressor=chosen.compressor, options=options)


def room_for(memory: float | None, device: torch.device, ranks: Ranks) -> tuple[int | None, int]:
    """Bytes that should be enough, and that must be, on the rank that has least; None: nothing limits them."""
    if memory is not None:
        return int(memory * 1e9), int(memory * 1e9)
    if device.type != "cuda":
        return None, 0
    free, total = torch.cuda.mem_get_info(device)
    least = torch.tensor([total // SHARE_OF_DEVICE, free], dtype=torch.int64, device=device)
    ranks.world.all_reduce(least, dist.ReduceOp.MIN).wait()
    room, limit = least.tolist()
    return room, limit
