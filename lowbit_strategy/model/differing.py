"""Finds what differs between ranks, by digests.

1. For each tensor: a weighted sum of its 64-bit words modulo 2^64, in one pass over memory.
2. For all tensors: the same sum over their digests, and one all-gather of 8 bytes per rank.
3. Only if the results differ: one all-gather of all tensors' digests, to name the tensors that differ.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.model.parameters import local_part


def differing(tensors: Mapping[str, Tensor], comm: Comm, device: torch.device) -> dict[str, list[int]]:
    """The tensors (for sharded ones, this rank's parts) that differ between ranks, and each rank's digest of those.
    Call it on all ranks.
    """
    if not tensors or comm.world_size == 1:
        return {}
    comm = comm.with_own_counter()  # the engine's counter counts gradients
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
