"""Where a parameter's elements live: cut over the ranks, per parameter and never per bucket.

A parameter of n elements is cut into W chunks of ``row_numel`` elements; rank r owns flat elements
``[r * row_numel, (r + 1) * row_numel)`` as far as they exist. Under DDP ``row_numel`` is a multiple of the block size,
so the grid of blocks is the same for every world size; under FSDP2 it is what the framework shards (whole dim-0 rows).
"""

from __future__ import annotations

from dataclasses import dataclass

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


def flat_cut(numel: int, world_size: int, block_size: int) -> Cut:
    """DDP: equal chunks of whole blocks."""
    return Cut(numel, round_up(-(-numel // world_size), block_size), world_size)


def dim0_cut(shape: tuple[int, ...], world_size: int) -> Cut:
    """FSDP2: equal chunks of whole dim-0 rows."""
    numel = 1
    for size in shape:
        numel *= size
    dim0 = shape[0] if shape else 1
    per_row = numel // dim0 if dim0 else 0
    return Cut(numel, -(-dim0 // world_size) * per_row, world_size)


def cut_of(shape: tuple[int, ...], world_size: int, block_size: int, *, scatter: bool) -> Cut:
    """A parameter's cut under FSDP2 (`scatter`) or DDP."""
    if scatter:
        return dim0_cut(shape, world_size)
    numel = 1
    for size in shape:
        numel *= size
    return flat_cut(numel, world_size, block_size)


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside one bucket.

    Args:
        name: The parameter.
        offset: First element of the chunk of rank 0 in the bucket buffer; under FSDP2 also of the own chunk in the
            output buffer.
        stride: Elements from one rank's chunk to the next: ``row_numel`` under DDP, the bucket's row under FSDP2.
        cut: The parameter's cut.
    """

    name: str
    offset: int
    stride: int
    cut: Cut
