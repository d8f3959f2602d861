"""Every pair of ranks by itself: how long a message takes from one to the other, and how many bytes go in a second."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from lowbit_strategy.advisor.bench_file import Pair, PairLevel
from lowbit_strategy.advisor.clocks import finish
from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.ranks.topology import Topology

MOST_PAIRS = 66  # all of 12 ranks
_PINGS, _CALLS = 4, 2
_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
_LONG_S = 0.1
_STREAMS = 4
_BUDGET_S = 10.0  # of all pairs together


def pairs_to_measure(world_size: int) -> list[tuple[int, int]]:
    """All of a few ranks; of many each with the next one, and some with the first."""
    every = list(itertools.combinations(range(world_size), 2))
    if len(every) <= MOST_PAIRS:
        return every
    ring = [(rank, rank + 1) for rank in range(min(world_size - 1, MOST_PAIRS // 2))]
    step = max(1, world_size // (MOST_PAIRS // 2))
    return sorted({*ring, *((0, rank) for rank in range(step, world_size, step))})


def measure_pairs(topology: Topology, device: torch.device, done: Callable[[], None] = lambda: None) -> list[Pair]:
    """One after the other, while all other ranks are quiet, until time runs out; on all ranks of the default
    group.

    Args:
        topology: Which of them share a node.
        device: Of messages.
        done: Called after each pair.

    Returns:
        The same on all ranks.
    """
    rank, found, began = dist.get_rank(), [], time.perf_counter()
    for first, second in pairs_to_measure(dist.get_world_size()):
        late = torch.tensor([float(time.perf_counter() - began > _BUDGET_S)], device=device)
        dist.all_reduce(late, op=dist.ReduceOp.MAX)  # all ranks stop at the same pair
        if float(late):
            break
        near = second in topology.neighbors(first)
        if rank in (first, second):
            pair = _measure((first, second), "intra-node" if near else "inter-node", device)
            if rank == first:
                found.append(pair)
        dist.barrier()
        done()
    return sorted(itertools.chain.from_iterable(gathered(found)), key=lambda pair: (pair.first, pair.second))


def _measure(ranks: tuple[int, int], level: PairLevel, device: torch.device) -> Pair:
    mine = dist.get_rank() == ranks[0]
    other = ranks[1] if mine else ranks[0]
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    _one_way([small], small, other, device, mine=mine)
    fastest, second, *_ = sorted(_one_way([small], small, other, device, mine=mine) for _ in range(_PINGS))
    latency, unsure = fastest / 2, second / fastest - 1
    rate = rate_unsure = 0.0
    for nbytes in _SIZES:
        x = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        seconds, slower = sorted(_one_way([x], small, other, device, mine=mine) for _ in range(_CALLS))
        rate = nbytes / max(seconds - 2 * latency, 1e-9)
        rate_unsure = min(1.0, (slower - seconds) / max(seconds - 2 * latency, 1e-9))
        both = torch.tensor([seconds], device=device)
        (dist.send if mine else dist.recv)(both, other)  # both stop at the same size
        if float(both) > _LONG_S:
            break
    parts = [torch.zeros(nbytes // _STREAMS, dtype=torch.uint8, device=device) for _ in range(_STREAMS)]
    seconds = min(_one_way(parts, small, other, device, mine=mine) for _ in range(_CALLS))
    together = nbytes / max(seconds - 2 * latency, 1e-9)
    return Pair(ranks[0], ranks[1], level, latency, rate, together, unsure, rate_unsure)


def _one_way(
    parts: Sequence[torch.Tensor], answer: torch.Tensor, other: int, device: torch.device, *, mine: bool
) -> float:
    """Seconds until all has arrived and the other has answered."""
    began = time.perf_counter()
    start = dist.isend if mine else dist.irecv
    works = [
        start(part, other, tag=1 + at) if device.type == "cpu" else start(part, other) for at, part in enumerate(parts)
    ]
    for work in works:
        assert work is not None
        work.wait()
    (dist.recv if mine else dist.send)(answer, other)
    finish(device)
    return time.perf_counter() - began
