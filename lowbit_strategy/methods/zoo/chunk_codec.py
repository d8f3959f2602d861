"""Sparse codes of fixed size, which send the largest elements of every chunk."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, Codec, DenseCodec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods.zoo.contraction import nearest
from lowbit_strategy.methods.zoo.kernels.chunk_top_k import CHUNK_NUMEL, chunk_top_k


@dataclass(frozen=True, slots=True)
class ChunkCodec(BucketCodec):
    """The largest of each chunk.

    Args:
        density: Fraction of the elements that is sent, in (0, 1]: ``round(4096 * density)`` of each chunk, at least
            one.
        values: Codec of the values.
    """

    density: float
    values: Codec = DenseCodec("float32")  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(f"density must be in (0, 1], got {self.density!r}")

    @property
    def label(self) -> str:
        return f"{self.kept} of {CHUNK_NUMEL}, {self.values.label}"

    @property
    def block_size(self) -> int:
        return CHUNK_NUMEL

    @property
    def kept(self) -> int:
        """Elements sent of a whole chunk."""
        return max(1, round(CHUNK_NUMEL * self.density))

    def num_kept(self, numel: int) -> int:
        """Elements sent of a segment."""
        return numel // CHUNK_NUMEL * self.kept + self.kept_of_tail(numel % CHUNK_NUMEL)

    def kept_of_tail(self, tail: int) -> int:
        return min(tail, max(1, round(tail * self.density)))

    def nearest(self) -> ChunkCodec:
        return ChunkCodec(self.density, nearest(self.values))

    def wire_nbytes(self, numel: int) -> int:
        kept = self.num_kept(numel)
        return _positions_nbytes(kept) + self.values.wire_nbytes(kept)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        table = segments.kept(("chunk", self), lambda: _Table(segments, self))
        if not table.num_kept:
            return
        places = table.on(x.device)
        packed = pack_segments(segments, CHUNK_NUMEL).collect(x)
        positions_MK, values_MK = chunk_top_k(packed, places.kept_M, self.kept)
        values_K = values_MK.view(-1).index_select(0, places.slot_K)
        self.values.encode_(values_K, wire, table.values, {}, step, flag)
        positions_P = torch.nn.functional.pad(positions_MK.view(-1), (0, 1)).index_select(0, places.slot_P)
        parts = _pack_positions(positions_P).split(table.packed_nbytes)
        torch._foreach_copy_(table.position_bytes(wire), list(parts))

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        table = segments.kept(("chunk", self), lambda: _Table(segments, self))
        if not table.num_kept:
            return
        places, packing = table.on(out.device), pack_segments(segments, CHUNK_NUMEL)
        total = torch.zeros(packing.numel, dtype=torch.float32, device=out.device)
        values_K = torch.empty(table.num_kept, dtype=torch.float32, device=out.device)
        for wire in wire_WB:
            positions_P = _unpack_positions(torch.cat(table.position_bytes(wire)))
            self.values.decode_sum_(wire[None], values_K, table.values, {}, 1.0)
            total.index_add_(0, places.chunk_start_K + positions_P.index_select(0, places.pair_K), values_K)
        packing.spread_(total.mul_(alpha), out)


def _aligned(nbytes: int) -> int:
    """Round up to a multiple of 16."""
    return -(-nbytes // 16) * 16


def _positions_nbytes(kept: int) -> int:
    return _aligned((kept + 1) // 2 * 3)


def _pack_positions(positions_P: Tensor) -> Tensor:
    """Pairs of 12-bit numbers as three bytes, little-endian."""
    low, high = positions_P.view(-1, 2).to(torch.int32).unbind(1)
    both = low | high << 12
    return torch.stack([both & 0xFF, both >> 8 & 0xFF, both >> 16], 1).to(torch.uint8).view(-1)


def _unpack_positions(packed: Tensor) -> Tensor:
    first, second, third = packed.view(-1, 3).to(torch.int64).unbind(1)
    return torch.stack([first | (second & 0xF) << 8, second >> 4 | third << 4], 1).view(-1)


class _Places(NamedTuple):
    """Index tensors of a table on one device.

    Args:
        kept_M: int32, elements sent of each chunk.
        slot_K: int64, the index of each sent element among the ``[M, kept]`` chosen entries.
        slot_P: The same with one more entry at the end of a segment with an odd number: pairs of positions.
        pair_K: int64, the index of each element's position in `slot_P`.
        chunk_start_K: int64, the first element of each one's chunk in the packed buffer.
    """

    kept_M: Tensor
    slot_K: Tensor
    slot_P: Tensor
    pair_K: Tensor
    chunk_start_K: Tensor


class _Table:
    """The places of sent elements for a table of segments."""

    def __init__(self, segments: Segments, codec: ChunkCodec) -> None:
        counts = [codec.num_kept(row.numel) for row in segments.rows]
        self.num_kept = sum(counts)
        self.packed_nbytes = [(count + 1) // 2 * 3 for count in counts]
        self._starts = [row.wire_offset for row in segments.rows]
        self.values = Segments(
            Segment(first, count, 0, row.wire_offset + _positions_nbytes(count), row.salt)
            for row, count, first in zip(segments.rows, counts, accumulate(counts, initial=0), strict=False)
            if count
        )
        kept: list[int] = []
        for row in segments.rows:
            whole, tail = divmod(row.numel, CHUNK_NUMEL)
            kept += [codec.kept] * whole + [codec.kept_of_tail(tail)] * (tail > 0)
        kept_M = torch.tensor(kept, dtype=torch.int32)
        sent_MK = torch.arange(codec.kept) < kept_M[:, None]
        slot_K = sent_MK.view(-1).nonzero().view(-1)
        count_S = torch.tensor(counts, dtype=torch.int64)
        odd_S = count_S % 2
        pair_K = torch.arange(self.num_kept) + torch.repeat_interleave(odd_S.cumsum(0) - odd_S, count_S)
        slot_P = torch.full((self.num_kept + int(odd_S.sum()),), sent_MK.numel())  # the zero after all entries
        slot_P[pair_K] = slot_K
        own = _Places(kept_M, slot_K, slot_P, pair_K, slot_K // codec.kept * CHUNK_NUMEL)
        self._on_device = {torch.device("cpu"): own}

    def on(self, device: torch.device) -> _Places:
        if device not in self._on_device:
            own = self._on_device[torch.device("cpu")]
            self._on_device[device] = _Places(*(part.to(device) for part in own))
        return self._on_device[device]

    def position_bytes(self, wire: Tensor) -> list[Tensor]:
        return [wire[start : start + n] for start, n in zip(self._starts, self.packed_nbytes, strict=True)]
