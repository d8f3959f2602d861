"""Measures whether the links between ranks are long."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import gathered

FAR_S = 5e-3  # shortest round trip of ranks that are far apart: between hosts of one site it is below 1 ms


_TRIES = 5  # round trips per measurement


_TIMES = 2  # measurements before ranks count as far apart: a machine may be busy for a while


def is_far(group: dist.ProcessGroup | None) -> bool:
    """Whether a round trip takes at least `FAR_S`. Call it on all ranks, which get the same answer.

    With several sites every rank is far from some other rank, so all wait for a long round trip. The fastest of several
    tries on the fastest rank counts, since a busy host need not be far. Ranks that share network interfaces are never
    far.
    """
    if len(set(gathered(_network(), group))) == 1:
        return False
    return all(_round_trip_s(group) >= FAR_S for _ in range(_TIMES))


def _network() -> str:
    """The host and, if the system has them, the network namespace of this process."""
    namespace = Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else ''}"


def _round_trip_s(group: dist.ProcessGroup | None) -> float:
    """The shortest round trip, the same on all ranks."""
    world_size = dist.get_world_size(group)
    shortest = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        _exchange(torch.zeros(world_size, dtype=torch.float64), group)
        shortest = min(shortest, time.perf_counter() - start)
    return float(_exchange(torch.full((world_size,), shortest, dtype=torch.float64), group).min())


def _exchange(x_W: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Send one element to each rank."""
    out_W = torch.empty_like(x_W)
    dist.all_to_all_single(out_W, x_W, group=group)
    return out_W
