"""Lays a bucket's segments end to end in whole blocks, so that plain PyTorch works on all of them at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lowbit_strategy.kernels.reference.rng import dither_at, stream_key
from lowbit_strategy.kernels.segments import Segment, Segments, segment_views

T = TypeVar("T")

PART_NUMEL = {False: 1 << 18, True: 1 << 22}  # elements of a part: they fit a CPU's cache, or keep a GPU busy
_HASHED_AT_ONCE = 1 << 20  # elements


class _Blocks(NamedTuple):
    """Each block's segment and its elements without padding; each segment's first block and salt."""

    segment_K: Tensor
    count_K: Tensor
    first_S: Tensor
    salt_S: Tensor


class Packed:
    """The segments of a `Segments` table one after the other, each padded with zeros to whole blocks.

    Its memory on the device grows with the number of blocks, not of elements.

    Attributes:
        source: The original segments.
        segments: The same segments with ``x_offset`` in the packed buffer.
        numel: Elements of the packed buffer, padding included.
    """

    def __init__(self, source: Segments, block_size: int) -> None:
        self.source = source
        self.block_size = block_size
        self.lengths = [-(-row.numel // block_size) * block_size for row in source.rows]
        *starts, self.numel = accumulate(self.lengths, initial=0)
        rows = [row._replace(x_offset=start) for row, start in zip(source.rows, starts, strict=True)]
        self.segments = Segments(rows)
        self._on_device: dict[torch.device, _Blocks] = {}

    @property
    def num_blocks(self) -> int:
        return self.numel // self.block_size

    def collect(self, x: Tensor) -> Tensor:
        """The segments of `x` as float32 [numel], with zeros between them."""
        return self.join(segment_views(x, self.source, "x_offset"), x.device)

    def join(self, parts: Sequence[Tensor], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Like `collect`, for segments in different tensors."""
        packed = torch.zeros(self.numel, dtype=dtype, device=device)
        _copy(self.views(packed), parts)
        return packed

    def views(self, packed: Tensor) -> list[Tensor]:
        """A view of each segment, without its padding."""
        return segment_views(packed, self.segments, "x_offset")

    def spread_(self, packed: Tensor, x: Tensor) -> None:
        """Write the segments back to their places in `x`."""
        _copy(segment_views(x, self.source, "x_offset"), self.views(packed))

    def collect_state(self, arena: Tensor, unit: int = 1) -> Tensor:
        """Copy the segments' part of an arena, in whole blocks; `unit` elements per entry."""
        parts = self._state(arena, unit)
        return torch.cat(parts) if parts else arena[:0].clone()

    def store_state_(self, arena: Tensor, values: Tensor, unit: int = 1) -> None:
        """Write values in the form of `collect_state` back into an arena."""
        parts = self._state(arena, unit)
        _copy(parts, values.split([part.numel() for part in parts]))

    def collect_wire(self, wire: Tensor, nbytes: int) -> Tensor:
        """uint8 [num_blocks, nbytes]: the payloads of all blocks."""
        parts = self._wire(wire, nbytes)
        return torch.cat(parts).view(-1, nbytes) if parts else wire[:0].view(0, nbytes)

    def store_wire_(self, wire: Tensor, payload: Tensor) -> None:
        parts = self._wire(wire, payload.shape[1])
        _copy(parts, payload.reshape(-1).split([part.numel() for part in parts]))

    def counts(self, device: torch.device) -> Tensor:
        """Number of elements per block that are not padding, int32 [num_blocks]."""
        return self._blocks(device).count_K

    def valid(self, device: torch.device) -> Tensor:
        """Boolean mask [num_blocks, block_size], False on padding."""
        return torch.arange(self.block_size, device=device) < self.counts(device)[:, None]

    def idle(self, packed: Tensor) -> Tensor:
        """Boolean mask [numel], True in segments that are all zero."""
        segment_K = self._blocks(packed.device).segment_K
        busy_K = (packed.view(-1, self.block_size) != 0).any(1)
        busy_S = torch.zeros(len(self.source), dtype=torch.int32, device=packed.device)
        busy_S.index_add_(0, segment_K, busy_K.int())
        return (busy_S == 0)[segment_K].repeat_interleave(self.block_size, output_size=self.numel)

    def noise(self, seed: int, stream: int, device: torch.device) -> Tensor:
        """Random float32 [num_blocks, block_size] in [-0.5, 0.5); a segment gets the same numbers in any bucket.

        It is computed in runs of blocks, since a hash needs several int64 of memory per element.
        """
        blocks = self._blocks(device)
        first_K = torch.arange(self.num_blocks, device=device) - blocks.first_S[blocks.segment_K]
        key_K = stream_key(seed, blocks.salt_S, stream)[blocks.segment_K]
        inside_B = torch.arange(self.block_size, device=device)
        noise_KB = torch.empty(self.num_blocks, self.block_size, dtype=torch.float32, device=device)
        num_blocks = max(1, min(_HASHED_AT_ONCE, PART_NUMEL[device.type == "cuda"]) // self.block_size)
        for first in range(0, self.num_blocks, num_blocks):
            run = slice(first, first + num_blocks)
            index_KB = first_K[run, None] * self.block_size + inside_B
            noise_KB[run] = dither_at(index_KB, key_K[run, None])
        return noise_KB

    def _blocks(self, device: torch.device) -> _Blocks:
        if device not in self._on_device:
            num_S = torch.tensor(self.lengths, dtype=torch.int64) // self.block_size
            first_S = num_S.cumsum(0) - num_S
            segment_K = torch.repeat_interleave(torch.arange(len(self.lengths), dtype=torch.int32), num_S)
            numel_S, salt_S = self.source.table[:, 1], self.source.table[:, 4]
            before_K = (torch.arange(self.num_blocks) - first_S[segment_K]) * self.block_size
            count_K = (numel_S[segment_K] - before_K).clamp(max=self.block_size).int()
            table = _Blocks(segment_K, count_K, first_S, salt_S)
            self._on_device[device] = _Blocks(*(tensor.to(device) for tensor in table))
        return self._on_device[device]

    def _state(self, arena: Tensor, unit: int) -> list[Tensor]:
        starts = (row.state_offset // unit for row in self.source.rows)
        return [arena[s : s + length // unit] for s, length in zip(starts, self.lengths, strict=True)]

    def _wire(self, wire: Tensor, nbytes: int) -> list[Tensor]:
        sizes = (length // self.block_size * nbytes for length in self.lengths)
        starts = (row.wire_offset for row in self.source.rows)
        return [wire[s : s + size] for s, size in zip(starts, sizes, strict=True)]


def pack_segments(segments: Segments, block_size: int) -> Packed:
    """The packing of a table."""
    return segments.kept(("packed", block_size), lambda: Packed(segments, block_size))


def parts_of(segments: Segments, device: torch.device) -> tuple[Segments, ...]:
    """Split the segments into runs of at most some millions of elements, or of one larger segment.

    Plain PyTorch then needs temporary memory for only one run.
    """
    limit = PART_NUMEL[device.type == "cuda"]

    def parts() -> tuple[Segments, ...]:
        runs: list[list[Segment]] = []
        room = 0
        for row in segments.rows:
            if not runs or row.numel > room:
                runs.append([])
                room = limit
            runs[-1].append(row)
            room -= row.numel
        return (segments,) if len(runs) == 1 else tuple(map(Segments, runs))

    return segments.kept(("parts", limit), parts)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))
