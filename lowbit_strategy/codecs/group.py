"""The largest element of every group: the sparse code whose positions cost least, of fixed size and without sorting.

A segment is cut into groups of 4, 16 or 256 elements, the last one filled up with zeros. The bytes of a segment with K
groups (as many as fill whole bytes of positions) are

1. 2, 4 or 8 bits per group: the position of its largest element, the first of equal ones
2. zeros up to a multiple of 16 bytes
3. the K values, group by group, through the codec of the values

A free choice of one element in 16 needs the place of each one: 5.4 bits, or 12 as a position in a chunk; here it is
4. What that gives away: two large elements in one group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, Codec, DenseCodec
from lowbit_strategy.codecs.packed import Packed, aligned, kept_with, pack_segments
from lowbit_strategy.kernels.segments import Segments

_POSITION_BITS = {4: 2, 16: 4, 256: 8}
GROUPS = tuple(_POSITION_BITS)


@dataclass(frozen=True, slots=True)
class GroupTop(BucketCodec):
    """The largest of each group.

    Args:
        group: Elements of a group: 4, 16 or 256.
        values: Codec of their values.
    """

    group: int
    values: Codec = DenseCodec("float32")  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if self.group not in _POSITION_BITS:
            raise ValueError(f"group must be 4, 16 or 256, got {self.group!r}")

    @property
    def label(self) -> str:
        return f"1 of {self.group}, {self.values.label}"

    @property
    def block_size(self) -> int:
        """Groups whose positions fill one byte."""
        return self.group * self._per_byte

    @property
    def _per_byte(self) -> int:
        return 8 // _POSITION_BITS[self.group]

    def nearest(self) -> GroupTop:
        return GroupTop(self.group, self.values.nearest())

    def wire_nbytes(self, numel: int) -> int:
        num_blocks = -(-numel // self.block_size)
        return aligned(num_blocks) + self.values.wire_nbytes(num_blocks * self._per_byte)

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        packed = pack_segments(segments, self.block_size)
        groups_KG = packed.collect(x).view(-1, self.group)
        flag |= (~groups_KG.isfinite().all()).to(flag.dtype)
        position_K = groups_KG.abs().argmax(1, keepdim=True)
        values_K = groups_KG.gather(1, position_K).view(-1)
        self.values.encode_segments_(values_K, wire, self._value_segments(packed), seed=seed, flag=flag)
        packed.store_wire_(wire, (position_K.view(-1, self._per_byte) << self._shifts(x)).sum(1, keepdim=True).byte())

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        packed = pack_segments(segments, self.block_size)
        first_K = torch.arange(0, packed.numel, self.group, device=out.device)
        total = torch.zeros(packed.numel, dtype=torch.float32, device=out.device)
        values_K = torch.empty_like(first_K, dtype=torch.float32)
        for wire in wire_WB:
            byte_K1 = packed.collect_wire(wire, 1).long()
            position_K = (byte_K1 >> self._shifts(out) & self.group - 1).view(-1)
            self.values.decode_sum_segments_(wire[None], values_K, self._value_segments(packed), alpha=1.0)
            total.index_add_(0, first_K + position_K, values_K)
        packed.spread_(total.mul_(alpha), out)

    def _shifts(self, like: Tensor) -> Tensor:
        return torch.arange(self._per_byte, device=like.device) * _POSITION_BITS[self.group]

    def _value_segments(self, packed: Packed) -> Segments:
        """The pieces' values, one per group, behind their positions."""

        def segments() -> Segments:
            rows = []
            for row, length in zip(packed.segments.rows, packed.lengths, strict=True):
                at = row.wire_offset + aligned(length // self.block_size)
                count = length // self.group
                rows.append(row._replace(x_offset=row.x_offset // self.group, numel=count, wire_offset=at))
            return Segments(rows)

        return kept_with(packed.segments, ("group", self.group, self.values), segments)
