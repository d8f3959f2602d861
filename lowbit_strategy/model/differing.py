"""Finds what differs between ranks, by digests.

1. Of each tensor: a weighted sum of its 64-bit words modulo 2^64, one pass over memory.
2. Of all: the same over the tensors' digests. One all-gather of 8 bytes per rank.
3. Only if those differ, one all-gather of all tensors' digests, to name what differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.model.parameters import local_part


def differing(tensors: Mapping[str, Tensor], comm: Comm, device: torch.device) -> dict[str, list[int]]:
    """The tensors (of sharded ones, this rank's parts) that differ between ranks, and each rank's digest of those. Call
    on all ranks.
    """
    if not tensors or comm.world_size == 1:
        return {}
    comm = comm.with_own_counter()  # the engine's counts gradients
    mine_N = digests(list(map(local_part, tensors.values())), device)
    found: dict[str, list[int]] = {}
    if len(set(_gathered(comm, digests([mine_N], device)).flatten().tolist())) > 1:
        each_NW = _gathered(comm, mine_N).T.tolist()
        found = {name: each for name, each in zip(tensors, each_NW, strict=True) if len({*each}) > 1}
    comm.end()
    return found


def _gathered(comm: Comm, mine_N: Tensor) -> Tensor:
    everyone_WN = mine_N.new_empty(comm.world_size, mine_N.numel())
    comm.all_gather(everyone_WN, mine_N).wait()
    return everyone_WN
