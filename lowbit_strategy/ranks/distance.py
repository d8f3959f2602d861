"""How long a message takes between the ranks of a group, measured once, before training."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.ranks.shape import FAR_S

_TRIES = 5  # each time that it is measured
_TIMES = 2  # before ranks are taken to be far apart: a machine may be busy for a while


def is_far(group: dist.ProcessGroup | None) -> bool:
    """Whether a round trip takes `FAR_S` or more; the same answer on all ranks, which all call this.

    Where ranks are at several sites every one of them is far from another, so that each waits for a round trip at
    least. The quickest of several tries on the quickest rank counts: a host that is busy is not far. Ranks that share a
    network's interfaces are not, whatever they measure.
    """
    if len(set(gathered(_network(), group))) == 1:
        return False
    return all(_round_trip_s(group) >= FAR_S for _ in range(_TIMES))


def _network() -> str:
    """The host and, where the system has them, the network namespace of this process."""
    namespace = Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else ''}"


def _round_trip_s(group: dist.ProcessGroup | None) -> float:
    """The quickest, the same on all ranks."""
    world_size = dist.get_world_size(group)
    quickest = float("inf")
    for _ in range(_TRIES):
        begun = time.perf_counter()
        _exchange(torch.zeros(world_size, dtype=torch.float64), group)
        quickest = min(quickest, time.perf_counter() - begun)
    return float(_exchange(torch.full((world_size,), quickest, dtype=torch.float64), group).min())


def _exchange(x_W: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """One element to each rank, and back of each."""
    out_W = torch.empty_like(x_W)
    dist.all_to_all_single(out_W, x_W, group=group)
    return out_W
