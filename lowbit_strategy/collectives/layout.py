"""Where a parameter's elements live: cut over the ranks, per parameter and never per bucket.

A parameter of n elements is cut into W chunks of ``row_numel`` elements; rank r owns flat elements
``[r * row_numel, (r + 1) * row_numel)`` as far as they exist. Under DDP ``row_numel`` is a multiple of the block size,
so the grid of blocks is the same for every world size; under FSDP2 it is what the framework shards (whole dim-0 rows).

Where ranks have two levels, a rank reduces a part of every parameter with the ranks of other nodes that have the same
part: a `Part` is where it lies in the parameter.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32

ALIGNMENT = 16  # bytes: every section of a message starts on a multiple, so that kernels may read it in wide words


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Cut:
    """How one parameter is cut over `world_size` ranks."""

    numel: int
    row_numel: int
    world_size: int

    def row_length(self, rank: int) -> int:
        """Elements of the chunk of `rank`, without padding; 0 for a rank that owns nothing of this parameter."""
        return max(0, min(self.row_numel, self.numel - rank * self.row_numel))


def salt_of(name: str, number: int) -> int:
    """32 bits that make the random numbers of a parameter's message with this number its own."""
    return hash32(zlib.crc32(name.encode()) + number * GOLDEN)


def flat_cut(numel: int, world_size: int, block_size: int) -> Cut:
    """DDP: equal chunks of whole blocks."""
    return Cut(numel, round_up(-(-numel // world_size), block_size), world_size)


def dim0_cut(shape: tuple[int, ...], world_size: int) -> Cut:
    """FSDP2, and inside a node: equal chunks of whole dim-0 rows."""
    numel = math.prod(shape)
    dim0 = shape[0] if shape else 1
    per_row = numel // dim0 if dim0 else 0
    return Cut(numel, -(-dim0 // world_size) * per_row, world_size)


@dataclass(frozen=True, slots=True)
class Part:
    """Which elements of a parameter a rank reduces, where it is not the whole parameter.

    Args:
        shape: What the whole parameter has.
        ranges: Start and length of each run of elements in the flat parameter; joined they are the part.
        row_numel: Reduce-scatter: elements of each rank's chunk of the part, padding included. None: all-reduce.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    row_numel: int | None = None

    def take(self, whole_N: Tensor) -> Tensor:
        """The part of a flat parameter."""
        return torch.cat([whole_N[start : start + length] for start, length in self.ranges])


def add_ranges_(whole_N: Tensor, ranges: Sequence[Sequence[int]], part_N: Tensor) -> None:
    """Add a part to the flat parameter that it belongs to."""
    at = 0
    for start, length in ranges:
        whole_N[start : start + length] += part_N[at : at + length]
        at += length


@functools.lru_cache(maxsize=256)  # the layers of a model are alike, and a part has a range per node
def part_of(
    shape: tuple[int, ...], row_dim: int, index: int, count: int, num_nodes: int | None
) -> tuple[tuple[int, ...], Part]:
    """The shape of the part of a parameter that number `index` of `count` ranks reduces, and where it lies.

    Args:
        shape: Of the parameter.
        row_dim: Dim that is outermost in memory: parts are whole rows of it.
        index: Rank inside the node, or inside the group that shards the model.
        count: Ranks there, which together have the whole parameter.
        num_nodes: Parameters are sharded over all ranks of this number of nodes, and this rank reduces the shards of
            all ranks that have its rank inside their node. None: one run of rows.
    """
    dims = shape or (1,)
    per_row = math.prod(dims[:row_dim] + dims[row_dim + 1 :])
    num_chunks = count * (num_nodes or 1)
    rows = -(-dims[row_dim] // num_chunks)
    starts = [min(dims[row_dim], rows * chunk) for chunk in range(index, num_chunks, count)]
    lengths = [min(dims[row_dim] - start, rows) for start in starts]
    ranges = tuple((start * per_row, length * per_row) for start, length in zip(starts, lengths, strict=True))
    own = (*dims[:row_dim], sum(lengths), *dims[row_dim + 1 :])
    return own, Part(shape, ranges, None if num_nodes is None else rows * per_row)


@dataclass(frozen=True, slots=True)
class ParamView:
    """Where one parameter lies in a bucket and in its codecs' state. All offsets count elements.

    Args:
        name: The parameter.
        offset: First element of the chunk of rank 0 in the bucket buffer; under FSDP2 also of the own chunk in the
            output buffer.
        row_stride: Elements from one rank's chunk to the next: ``row_numel`` under DDP, the bucket's row under FSDP2.
        cut: The parameter's cut.
        state_offset: First element of the own chunk in state that holds one chunk of each parameter; in state of whole
            parameters it is W times that.
        out_offset: Reduce-scatter: first element of the own chunk in the output buffer. None: `offset`.
    """

    name: str
    offset: int
    row_stride: int
    cut: Cut
    state_offset: int = 0
    out_offset: int | None = None
