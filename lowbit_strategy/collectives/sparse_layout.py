"""The messages of sparse methods: which positions are said, and how they are written.

A bucket's parameters stand one after the other. Under all-reduce every rank gets the same message about all of them;
under reduce-scatter each owner gets one about its rows. Each parameter (or its row) is cut into blocks of 65,536
positions, and a message of k entries is

1. int32: how many entries each block has
2. uint16: the entries' positions in their blocks, ascending, 2 bytes an entry for parameters of any size
3. the entries' values, each parameter's through the codec
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.layout import Cut
from lowbit_strategy.kernels.reference.rng import GOLDEN, hash32

BLOCK_BITS = 16
COUNT_NBYTES = 4
POSITION_NBYTES = 2


def counts_nbytes(numel: int) -> int:
    """Of the table of counts of `numel` positions."""
    return COUNT_NBYTES * -(-numel // (1 << BLOCK_BITS))


def entries_nbytes(count: int, codec: Codec) -> int:
    """Of `count` entries of one parameter, without their table of counts."""
    return POSITION_NBYTES * count + codec.wire_nbytes(count)


class Chosen(NamedTuple):
    """What a rank says of one parameter: ascending flat positions, int64 [k], and float32 values, [k]."""

    indices: Tensor
    values: Tensor


class Message(NamedTuple):
    """Entries on their way.

    Args:
        counts_DB: int32, entries in each block, for each destination (a single one under all-reduce).
        wires: Positions and values for each destination, uint8.
        sent: For each parameter the values as the others decode them, float32 [k].
    """

    counts_DB: Tensor
    wires: list[Tensor]
    sent: list[Tensor]


class Located(NamedTuple):
    """Entries of all parameters put in the order of messages: by destination, then parameter, then position."""

    order: Tensor | None  # int64 [K]: where each comes from in the parameters' concatenation; None: as it is
    block: Tensor  # int64 [K], counted through all destinations
    position: Tensor  # int64 [K], in the block
    counts_DV: list[list[int]]  # entries for each destination and parameter


class SparseLayout:
    """Where a bucket's parameters stand in sparse messages, on one rank. Use `sparse_layout` to make one.

    Attributes:
        num_destinations: Different messages a rank makes: 1 under all-reduce, W under reduce-scatter.
        numel: Elements of a received sum: all parameters, or the own rows.
        starts: Of each parameter in it.
    """

    def __init__(
        self, names: Sequence[str], cuts: Sequence[Cut], world_size: int, device: torch.device, *, scatter: bool
    ) -> None:
        self.names = tuple(names)
        self.num_destinations = world_size if scatter else 1
        self.spans = tuple(cut.row_numel if scatter else cut.numel for cut in cuts)
        self.starts = _running(self.spans)
        self.numel = sum(self.spans)
        blocks = [counts_nbytes(span) // COUNT_NBYTES for span in self.spans]
        self.num_blocks = sum(blocks)
        self._first_block = _running(blocks)
        flat = [start + (b << BLOCK_BITS) for start, n in zip(self.starts, blocks, strict=True) for b in range(n)]
        owner = [v for v, n in enumerate(blocks) for _ in range(n)]
        self._flat_start_B = torch.tensor(flat, dtype=torch.int64, device=device)
        self._view_of_block_B = torch.tensor(owner, dtype=torch.int64, device=device)
        self._first_block_V = torch.tensor(self._first_block, dtype=torch.int64, device=device)
        self._span_V = torch.tensor(self.spans, dtype=torch.int64, device=device)
        self.device = device

    def locate(self, indices: Sequence[Tensor]) -> Located:
        """Put the chosen positions of all parameters in the order of messages."""
        sizes = [part.numel() for part in indices]
        index_K = torch.cat(list(indices)).long()
        sizes_V = torch.tensor(sizes, device=self.device)
        view_K = torch.arange(len(sizes), device=self.device).repeat_interleave(sizes_V, output_size=sum(sizes))
        if self.num_destinations == 1:
            block_K = self._first_block_V.index_select(0, view_K) + (index_K >> BLOCK_BITS)
            return Located(None, block_K, index_K & 0xFFFF, [sizes])
        span_K = self._span_V.index_select(0, view_K)
        destination_K = index_K // span_K
        order = destination_K.argsort(stable=True)
        view_K, destination_K = view_K.index_select(0, order), destination_K.index_select(0, order)
        local_K = index_K.index_select(0, order) - destination_K * span_K.index_select(0, order)
        block_K = (
            destination_K * self.num_blocks + self._first_block_V.index_select(0, view_K) + (local_K >> BLOCK_BITS)
        )
        places = torch.bincount(destination_K * len(sizes) + view_K, minlength=self.num_destinations * len(sizes))
        return Located(order, block_K, local_K & 0xFFFF, places.view(self.num_destinations, -1).tolist())

    def pack(self, chosen: Sequence[Chosen], codec: Codec, *, seed: int) -> Message:
        """Write the messages. `seed` is for stochastic codecs; each parameter's section gets its own."""
        located = self.locate([part.indices for part in chosen])
        values_K = torch.cat([part.values for part in chosen])
        sorted_K = values_K if located.order is None else values_K.index_select(0, located.order)
        counts_DB = torch.bincount(located.block, minlength=self.num_destinations * self.num_blocks)
        positions = located.position.to(torch.int16).view(torch.uint8)
        wires, sent, at = [], [], 0
        for destination, counts in enumerate(located.counts_DV):
            k = sum(counts)
            encoded, decoded = self._encode(sorted_K[at : at + k], counts, codec, seed, destination)
            wires.append(torch.cat([positions[POSITION_NBYTES * at : POSITION_NBYTES * (at + k)], encoded]))
            sent.append(decoded)
            at += k
        sent_K = torch.cat(sent)
        if located.order is not None:
            sent_K = torch.empty_like(sent_K).index_copy_(0, located.order, sent_K)
        return Message(
            counts_DB.to(torch.int32).view(self.num_destinations, -1),
            wires,
            list(sent_K.split([part.indices.numel() for part in chosen])),
        )

    def _encode(
        self, values: Tensor, counts: Sequence[int], codec: Codec, seed: int, destination: int
    ) -> tuple[Tensor, Tensor]:
        """The values of one message as bytes, and as they decode."""
        if isinstance(codec, DenseCodec):  # the bytes of a concatenation are the concatenated bytes
            return codec.encode(values, seed=seed), values.to(codec.torch_dtype).float()
        wires, decoded = [], []
        for name, part in zip(self.names, values.split(list(counts)), strict=True):
            if part.numel():
                wire = codec.encode(part.contiguous(), seed=seed ^ _salt(name, destination))
                wires.append(wire)
                decoded.append(codec.decode_sum(wire[None], part.numel()))
        if not wires:
            return values.new_empty(0, dtype=torch.uint8), values
        return torch.cat(wires), torch.cat(decoded)

    def nbytes(self, counts_SB: Tensor, codec: Codec) -> list[int]:
        """Of the wires that tables of counts announce, one a row."""
        if isinstance(codec, DenseCodec):
            return [entries_nbytes(k, codec) for k in counts_SB.sum(1).tolist()]
        return [sum(entries_nbytes(k, codec) for k in row) for row in self._by_view(counts_SB)]

    def add_(self, total: Tensor, counts_B: Tensor, wire: Tensor, codec: Codec) -> None:
        """Add one source's message to a sum, float32 [numel]. No position comes twice in a message."""
        k = int(counts_B.sum())
        if not k:
            return
        total.index_add_(0, self._flat(counts_B, wire), self._decode(wire[POSITION_NBYTES * k :], counts_B, codec))

    def positions(self, counts_B: Tensor, wire: Tensor) -> list[Tensor]:
        """The positions in each parameter that a message says. All-reduce layouts only."""
        sizes = self._by_view(counts_B[None])[0]
        parts = zip(self._flat(counts_B, wire).split(sizes), self.starts, strict=True)
        return [flat - start for flat, start in parts]

    def unpack(self, counts_B: Tensor, wire: Tensor, codec: Codec) -> list[Chosen]:
        """What one source's message says of each parameter. All-reduce layouts only."""
        indices = self.positions(counts_B, wire)
        k = sum(part.numel() for part in indices)
        values = self._decode(wire[POSITION_NBYTES * k :], counts_B, codec) if k else wire.new_empty(0).float()
        parts = values.split([part.numel() for part in indices])
        return [Chosen(index, value) for index, value in zip(indices, parts, strict=True)]

    def _flat(self, counts_B: Tensor, wire: Tensor) -> Tensor:
        k = int(counts_B.sum())
        positions = wire[: POSITION_NBYTES * k].clone().view(torch.int16).long() & 0xFFFF
        return self._flat_start_B.repeat_interleave(counts_B, output_size=k) + positions

    def _decode(self, wire: Tensor, counts_B: Tensor, codec: Codec) -> Tensor:
        if isinstance(codec, DenseCodec):
            return wire.clone().view(codec.torch_dtype).float()  # a clone is aligned
        values, at = [], 0
        for k in self._by_view(counts_B[None])[0]:
            if k:
                nbytes = codec.wire_nbytes(k)
                values.append(codec.decode_sum(wire[None, at : at + nbytes].contiguous(), k))
                at += nbytes
        return torch.cat(values)

    def _by_view(self, counts_SB: Tensor) -> list[list[int]]:
        counts_SV = torch.zeros(counts_SB.shape[0], len(self.names), dtype=torch.int64, device=counts_SB.device)
        return counts_SV.index_add_(1, self._view_of_block_B, counts_SB.long()).tolist()

    def flat(self, located: Located) -> Tensor:
        """Places of entries in a sum, int64 [K]; under reduce-scatter of each destination's own."""
        return self._flat_start_B.index_select(0, located.block % max(self.num_blocks, 1)) + located.position


@lru_cache(maxsize=256)
def sparse_layout(
    names: tuple[str, ...], cuts: tuple[Cut, ...], world_size: int, device: torch.device, *, scatter: bool
) -> SparseLayout:
    """The layout of a bucket; made once, since buckets come round every step."""
    return SparseLayout(names, cuts, world_size, device, scatter=scatter)


def _running(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    return starts


def _salt(name: str, destination: int) -> int:
    return hash32(zlib.crc32(name.encode()) + destination * GOLDEN)
