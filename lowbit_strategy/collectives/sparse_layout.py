"""The messages of sparse methods: which positions are sent, and how they are encoded.

A bucket's parameters are laid out one after the other. Under all-reduce every rank gets the same message about all of
them; under reduce-scatter each owner gets one about its rows. Each parameter (or its row) is cut into blocks of 65,536
positions, and a message of k entries is

1. int32: how many entries each block has
2. uint16: the entries' positions in their blocks, ascending, 2 bytes an entry for parameters of any size
3. the entries' values, each parameter's through the codec

Twelve bits for a position would need blocks of 4,096 and sixteen times as many counts, which cost more than they save
below one element in a hundred. Where each block of 4,096 sends the same number of elements no count is needed: see
`lowbit_strategy.codecs.chunk`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
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
_FEW_BLOCKS = 64


def counts_nbytes(numel: int) -> int:
    """Bytes of the table of counts of `numel` positions."""
    return COUNT_NBYTES * -(-numel // (1 << BLOCK_BITS))


def entries_nbytes(count: int, codec: Codec) -> int:
    """Bytes of `count` entries of one parameter, without their table of counts."""
    return POSITION_NBYTES * count + codec.wire_nbytes(count)


class Chosen(NamedTuple):
    """What a rank sends of one parameter: ascending flat positions, int64 [k], and float32 values, [k]."""

    indices: Tensor
    values: Tensor


class Message(NamedTuple):
    """A rank's encoded entries.

    Args:
        counts_DK: int32, entries in each block, for each destination (a single one under all-reduce).
        wires: Positions and values for each destination, uint8.
        sent: For each parameter the values as the others decode them, float32 [k].
    """

    counts_DK: Tensor
    wires: list[Tensor]
    sent: list[Tensor]


class Located(NamedTuple):
    """Entries of all parameters put in the order of messages: by destination, then parameter, then position."""

    order: Tensor | None  # int64 [E]: where each comes from in the parameters' concatenation; None: as it is
    block: Tensor  # int64 [E], counted through all destinations
    position: Tensor  # int64 [E], in the block
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
        self._flat_start_K = torch.tensor(flat, dtype=torch.int64, device=device)
        self._lengths = lengths = [
            min(span - (b << BLOCK_BITS), 1 << BLOCK_BITS)
            for span, n in zip(self.spans, blocks, strict=True)
            for b in range(n)
        ]
        self._length_K = torch.tensor(lengths, dtype=torch.int64, device=device)
        self._view_of_block_K = torch.tensor(owner, dtype=torch.int64, device=device)
        self._first_block_V = torch.tensor(self._first_block, dtype=torch.int64, device=device)
        self._span_V = torch.tensor(self.spans, dtype=torch.int64, device=device)
        self.device = device

    def locate(self, indices: Sequence[Tensor]) -> Located:
        """Put the chosen positions of all parameters in the order of messages."""
        sizes = [part.numel() for part in indices]
        if self.num_blocks == self.num_destinations == 1:
            index_E = indices[0].long()
            return Located(None, torch.zeros_like(index_E), index_E, [sizes])
        index_E = torch.cat(list(indices)).long()
        sizes_V = torch.tensor(sizes, device=self.device)
        view_E = torch.arange(len(sizes), device=self.device).repeat_interleave(sizes_V, output_size=sum(sizes))
        if self.num_destinations == 1:
            block_E = self._first_block_V.index_select(0, view_E) + (index_E >> BLOCK_BITS)
            return Located(None, block_E, index_E & 0xFFFF, [sizes])
        span_E = self._span_V.index_select(0, view_E)
        destination_E = index_E // span_E
        order = destination_E.argsort(stable=True)
        view_E, destination_E = view_E.index_select(0, order), destination_E.index_select(0, order)
        local_E = index_E.index_select(0, order) - destination_E * span_E.index_select(0, order)
        block_E = (
            destination_E * self.num_blocks + self._first_block_V.index_select(0, view_E) + (local_E >> BLOCK_BITS)
        )
        places = torch.bincount(destination_E * len(sizes) + view_E, minlength=self.num_destinations * len(sizes))
        return Located(order, block_E, local_E & 0xFFFF, places.view(self.num_destinations, -1).tolist())

    def pack(self, chosen: Sequence[Chosen], codec: Codec, *, seed: int) -> Message:
        """Write the messages. `seed` is for stochastic codecs; each parameter's section gets its own."""
        located = self.locate([part.indices for part in chosen])
        values_E = chosen[0].values if len(chosen) == 1 else torch.cat([part.values for part in chosen])
        sorted_E = values_E if located.order is None else values_E.index_select(0, located.order)
        if self.num_destinations == self.num_blocks == 1:
            counts_DK = torch.tensor([values_E.numel()], dtype=torch.int32, device=self.device)
        else:
            counts_DK = torch.bincount(located.block, minlength=self.num_destinations * self.num_blocks)
        positions = located.position.to(torch.int16).view(torch.uint8)
        wires, sent, at = [], [], 0
        for destination, counts in enumerate(located.counts_DV):
            k = sum(counts)
            encoded, decoded = self._encode(sorted_E[at : at + k], counts, codec, seed, destination)
            wires.append(torch.cat([positions[POSITION_NBYTES * at : POSITION_NBYTES * (at + k)], encoded]))
            sent.append(decoded)
            at += k
        sent_E = sent[0] if len(sent) == 1 else torch.cat(sent)
        if len(chosen) == 1 and located.order is None:
            return Message(counts_DK.to(torch.int32).view(1, -1), wires, [sent_E])
        if located.order is not None:
            sent_E = torch.empty_like(sent_E).index_copy_(0, located.order, sent_E)
        return Message(
            counts_DK.to(torch.int32).view(self.num_destinations, -1),
            wires,
            list(sent_E.split([part.indices.numel() for part in chosen])),
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

    def sizes(self, counts_SK: Tensor) -> list[list[int]]:
        """Entries of each parameter that received tables of counts announce, one row per source.

        Raises:
            RuntimeError: A table that no rank could have sent.
        """
        if counts_SK.numel() <= _FEW_BLOCKS and counts_SK.device.type == "cpu":
            return self._few_sizes(counts_SK.tolist())
        counts_SV = torch.zeros(counts_SK.shape[0], 1 + len(self.names), dtype=torch.int64, device=counts_SK.device)
        counts_SV[:, 0] = ((counts_SK < 0) | (counts_SK > self._length_K)).sum(1)
        counts_SV[:, 1:].index_add_(1, self._view_of_block_K, counts_SK.long())
        rows: list[list[int]] = counts_SV.tolist()
        for source, row in enumerate(rows):
            if row[0]:
                raise impossible_table(source, row[0], self.num_blocks)
        return [row[1:] for row in rows]

    def _few_sizes(self, counts_SK: list[list[int]]) -> list[list[int]]:
        """The same from numbers: for small tables faster than operations on tensors."""
        rows = []
        for source, counts_K in enumerate(counts_SK):
            wrong = sum(not 0 <= count <= most for count, most in zip(counts_K, self._lengths, strict=True))
            if wrong:
                raise impossible_table(source, wrong, self.num_blocks)
            edges = [*self._first_block, self.num_blocks]
            rows.append([sum(counts_K[first:last]) for first, last in pairwise(edges)])
        return rows

    def nbytes(self, sizes_V: Sequence[int], codec: Codec) -> int:
        """Bytes of the wire that holds so many entries of each parameter."""
        if isinstance(codec, DenseCodec):
            return entries_nbytes(sum(sizes_V), codec)
        return sum(entries_nbytes(k, codec) for k in sizes_V)

    def positions(self, counts_K: Tensor, sizes_V: Sequence[int], wire: Tensor) -> list[Tensor]:
        """The positions in each parameter (its row) that a message holds.

        Raises:
            RuntimeError: The message is too short for its table, or a position lies outside its parameter.
        """
        k = sum(sizes_V)
        if wire.numel() < POSITION_NBYTES * k:
            raise damaged_message(f"{k} positions are announced, but the message has {wire.numel()} bytes")
        low_E = wire[: POSITION_NBYTES * k].clone().view(torch.int16).long() & 0xFFFF
        if self.num_blocks == 1:
            if k and self._lengths[0] < 1 << BLOCK_BITS and int(low_E.max()) >= self._lengths[0]:
                raise damaged_message("a position lies beyond the end of its parameter")
            return [low_E]
        block_E = torch.arange(self.num_blocks, device=wire.device).repeat_interleave(counts_K, output_size=k)
        if k and bool((low_E >= self._length_K.index_select(0, block_E)).any()):
            raise damaged_message("a position lies beyond the end of its parameter")
        flat_E = self._flat_start_K.index_select(0, block_E) + low_E
        return [flat - start for flat, start in zip(flat_E.split(list(sizes_V)), self.starts, strict=True)]

    def unpack(self, counts_K: Tensor, sizes_V: Sequence[int], wire: Tensor, codec: Codec) -> list[Chosen]:
        """The entries of each parameter (its row) that one source's message holds.

        Args:
            counts_K: The source's table.
            sizes_V: Its row of `sizes`.
            wire: Its positions and values.
            codec: Of the values.

        Raises:
            RuntimeError: The message is damaged.
        """
        if wire.numel() != self.nbytes(sizes_V, codec):
            raise damaged_message(f"{self.nbytes(sizes_V, codec)} bytes are announced, {wire.numel()} came")
        indices = self.positions(counts_K, sizes_V, wire)
        values = self._decode(wire[POSITION_NBYTES * sum(sizes_V) :], sizes_V, codec)
        return [Chosen(*pair) for pair in zip(indices, values.split(list(sizes_V)), strict=True)]

    def _decode(self, wire: Tensor, sizes_V: Sequence[int], codec: Codec) -> Tensor:
        if isinstance(codec, DenseCodec):
            return wire.clone().view(codec.torch_dtype).float()  # a clone is aligned
        values, at = [torch.empty(0, dtype=torch.float32, device=wire.device)], 0
        for k in sizes_V:
            if k:
                nbytes = codec.wire_nbytes(k)
                values.append(codec.decode_sum(wire[None, at : at + nbytes].contiguous(), k))
                at += nbytes
        return torch.cat(values)


def impossible_table(source: int, wrong: int, num_blocks: int) -> RuntimeError:
    """The error for a table of counts that no rank could have sent."""
    return damaged_message(f"table {source} of counts is impossible for {wrong} of {num_blocks} blocks")


def damaged_message(what: str) -> RuntimeError:
    """The error for a sparse message that does not fit its parameters."""
    return RuntimeError(
        f"a sparse message is damaged: {what}. The ranks run different models, compressors or versions of"
        " lowbit_strategy, or the network corrupts data: compare them, and restart from the last checkpoint"
    )


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
