"""Tables of segments of a flat gradient buffer, so that one kernel launch processes a bucket."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import SCALE_NBYTES, BlockFormat

T = TypeVar("T")

CACHE_ELEMENTS = 65536  # elements of a run in plain PyTorch: few enough for a cache, enough to hide call overhead


class Segment(NamedTuple):
    """One contiguous run of elements: one owner's share of a parameter.

    Args:
        x_offset: First element in the float buffer.
        numel: Elements; the last block is padded with zeros up to the block size.
        state_offset: First element in the residual arena, a multiple of the block size; its block index there is
            ``state_offset / block_size``. The arena holds whole blocks.
        wire_offset: First byte in one source's wire buffer, a multiple of 16.
        salt: 32 bits that give this segment its own random numbers, the same in any bucket.
    """

    x_offset: int
    numel: int
    state_offset: int
    wire_offset: int
    salt: int = 0


class Segments:
    """An immutable table of `Segment` rows.

    ``table`` is int64 ``[S, 5]`` on the CPU, columns in the order of `Segment`'s fields.
    """

    __slots__ = ("_kept", "rows", "table")

    def __init__(self, rows: Iterable[Segment]) -> None:
        self.rows = tuple(rows)
        self.table = torch.tensor(self.rows, dtype=torch.int64).reshape(-1, len(Segment._fields))
        self._kept: dict[Hashable, object] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """A value made from the table, such as a launch grid's tiles; made once and kept as long as the table."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])


def segment_views(
    x: Tensor, segments: Segments, field: Literal["x_offset", "wire_offset"], unit: int = 1
) -> list[Tensor]:
    """A view of each segment's elements of `x`, made by one operation; offsets are divided by `unit`.

    Raises:
        ValueError: Two segments overlap.
    """
    sizes, order = segments.kept(("views", field, unit), lambda: _segments_and_gaps(segments, field, unit))
    parts = x[: sum(sizes)].split_with_sizes(sizes)
    return [parts[i] for i in order]


def _segments_and_gaps(segments: Segments, field: str, unit: int) -> tuple[list[int], list[int]]:
    """Alternating sizes of gaps and segments, and each segment's index among them."""
    starts = [getattr(row, field) // unit for row in segments.rows]
    sizes, order, end = [], [0] * len(starts), 0
    for index in sorted(range(len(starts)), key=lambda i: (starts[i], segments.rows[i].numel)):
        if starts[index] < end:
            raise ValueError(f"segments overlap in {field}: {segments.rows[index]} starts before {end * unit}")
        sizes += [starts[index] - end, segments.rows[index].numel]
        order[index] = len(sizes) - 1
        end = starts[index] + sizes[-1]
    return sizes, order


class Run(NamedTuple):
    """A run of whole blocks of one segment, with slices of everything that it touches."""

    x: slice
    state: slice
    state_blocks: slice
    codes: slice
    scales: slice
    first_element: int
    salt: int


def runs(segments: Segments, fmt: BlockFormat, max_elements: int = CACHE_ELEMENTS) -> Iterator[Run]:
    """Cut the segments into runs of at most `max_elements` (at least one block)."""
    step = max(1, max_elements // fmt.block_size)
    for row in segments.rows:
        num_blocks = fmt.num_blocks(row.numel)
        scales_start = row.wire_offset + num_blocks * fmt.code_nbytes
        state_block = row.state_offset // fmt.block_size
        for first in range(0, num_blocks, step):
            last = min(first + step, num_blocks)
            start, stop = first * fmt.block_size, min(last * fmt.block_size, row.numel)
            yield Run(
                x=slice(row.x_offset + start, row.x_offset + stop),
                state=slice(row.state_offset + start, row.state_offset + last * fmt.block_size),
                state_blocks=slice(state_block + first, state_block + last),
                codes=slice(row.wire_offset + first * fmt.code_nbytes, row.wire_offset + last * fmt.code_nbytes),
                scales=slice(scales_start + first * SCALE_NBYTES, scales_start + last * SCALE_NBYTES),
                first_element=start,
                salt=row.salt,
            )
