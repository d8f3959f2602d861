"""Cuts a flattened model into blocks, and the blocks into one partition per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

MAX_BLOCKS = 1024
BLOCK_MULTIPLE = 32
_UNBALANCED = 0.1  # loads further than this above the mean, apart from noise: partitions are cut again


class Grid(NamedTuple):
    """Blocks of a flattened model; the last one also holds the tail."""

    numel: int
    block_numel: int
    num_blocks: int

    def bounds(self, sizes: Sequence[int]) -> list[int]:
        """First element of each partition, and the end; `sizes` are in blocks."""
        *starts, _ = accumulate(sizes, initial=0)
        return [*(block * self.block_numel for block in starts), self.numel]


def make_grid(numel: int) -> Grid:
    """1024 blocks of a multiple of 32 elements; fewer for a model with fewer than 32,768 elements."""
    block_numel = max(BLOCK_MULTIPLE, numel // MAX_BLOCKS // BLOCK_MULTIPLE * BLOCK_MULTIPLE)
    return Grid(numel, block_numel, min(MAX_BLOCKS, max(1, numel // block_numel)))


def equal_sizes(num_blocks: int, world_size: int) -> list[int]:
    """Blocks per partition at the start; at most one partition per block."""
    count = min(num_blocks, world_size)
    return [num_blocks * (p + 1) // count - num_blocks * p // count for p in range(count)]


def balanced(sizes: Sequence[int], loads: Sequence[float], minimum: int) -> list[int]:
    """Move one block from each partition with too many chosen elements to a neighbor with too few."""
    sizes, mean = list(sizes), sum(loads) / len(loads)
    if mean == 0:
        return sizes
    for i in range(len(sizes) - 1):
        here, uplink = loads[i] / mean, loads[i + 1] / mean
        if here > 1.05 and uplink < 0.952 and sizes[i] > minimum:
            sizes[i], sizes[i + 1] = sizes[i] - 1, sizes[i + 1] + 1
        elif uplink > 1.05 and here < 0.952 and sizes[i + 1] > minimum:
            sizes[i], sizes[i + 1] = sizes[i] + 1, sizes[i + 1] - 1
    return sizes


def repartitioned(block_loads: Sequence[float], num_partitions: int) -> list[int]:
    """Blocks per partition, at least one, so that all have about the same number of chosen elements."""
    num_blocks, total = len(block_loads), sum(block_loads)
    sizes, at, seen = [], 0, 0.0
    for p in range(1, num_partitions):
        first, latest = at, num_blocks - (num_partitions - p)
        target = total * p / num_partitions
        while at < latest and (at == first or seen + block_loads[at] / 2 <= target):
            seen += block_loads[at]
            at += 1
        sizes.append(at - first)
    return [*sizes, num_blocks - at]


def is_unbalanced(loads: Sequence[float]) -> bool:
    mean = sum(loads) / len(loads)
    return max(loads) > (1 + _UNBALANCED) * mean + 2 * math.sqrt(mean)
