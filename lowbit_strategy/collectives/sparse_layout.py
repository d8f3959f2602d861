"""The messages of sparse methods: how positions and values are encoded.

A bucket's parameters are laid out one after the other. Under all-reduce all ranks get the same message about all
parameters; under reduce-scatter each owner gets a message about its rows. Each parameter (or its row) is cut into
blocks of 65,536 positions, and a message of k entries is

1. int32: the number of entries in each block
2. uint16: the entries' positions in their blocks, ascending: 2 bytes per entry for parameters of any size
3. the entries' values, encoded parameter by parameter

Twelve bits for a position would need blocks of 4,096 and sixteen times as many counts, which cost more than they save
below one element in a hundred. If every block of 4,096 sends the same number of elements, no counts are needed: see
`lowbit_strategy.methods.zoo.chunk_codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.collectives.layout import ParamView, salt_of
from lowbit_strategy.kernels.block_positions import BLOCK_BITS, BlockGrid, Located, locate, positions

COUNT_NBYTES = 4
POSITION_NBYTES = 2


def counts_nbytes(numel: int) -> int:
    """Bytes of the table of counts of `numel` positions."""
    return COUNT_NBYTES * -(-numel // (1 << BLOCK_BITS))


def entries_nbytes(count: int, codec: Codec) -> int:
    """Bytes of `count` entries of one parameter, without their table of counts."""
    return POSITION_NBYTES * count + codec.wire_nbytes(count)


class Chosen(NamedTuple):
    """The entries of one parameter that a rank sends: ascending flat positions, int64 [k], and values, float32 [k]."""

    indices: Tensor
    values: Tensor

    def without_zeros(self) -> Chosen:
        """These entries without zeros, which need not be sent."""
        if self.values.all():
            return self
        keep = self.values.nonzero().view(-1)
        return Chosen(*(part.index_select(0, keep) for part in self))


class SparseMessage(NamedTuple):
    """A rank's encoded entries.

    Args:
        counts_DK: int32, entries in each block, for each destination (a single one under all-reduce).
        wires: Positions and values for each destination, uint8.
        sent: Each parameter's entries as the other ranks decode them.
    """

    counts_DK: Tensor
    wires: list[Tensor]
    sent: list[Chosen]

    @property
    def whole(self) -> Tensor:
        """The only destination's table of counts and its entries as one uint8 message."""
        return torch.cat([self.counts_DK[0].view(torch.uint8), self.wires[0]])


class SparseLayout:
    """The places of a bucket's parameters in sparse messages, on one rank. Use `sparse_layout` to make one.

    Attributes:
        num_destinations: Number of different messages that a rank makes: 1 under all-reduce, W under reduce-scatter.
        spans: Elements of each parameter, or of its rows.
    """

    def __init__(self, names: Sequence[str], spans: Sequence[int], num_destinations: int, device: torch.device) -> None:
        self.names = tuple(names)
        self.num_destinations = num_destinations
        self.spans = tuple(spans)
        blocks = [counts_nbytes(span) // COUNT_NBYTES for span in self.spans]
        *first_blocks, self.num_blocks = accumulate(blocks, initial=0)
        self.table_nbytes = COUNT_NBYTES * self.num_blocks
        owner = [v for v, n in enumerate(blocks) for _ in range(n)]
        starts = [b << BLOCK_BITS for n in blocks for b in range(n)]
        lengths = [min(self.spans[v] - start, 1 << BLOCK_BITS) for v, start in zip(owner, starts, strict=True)]
        self._view_of_block_K = torch.tensor(owner, dtype=torch.int64, device=device)
        span_V, first_block_V, start_K, length_K = (
            torch.tensor(table, dtype=torch.int64, device=device)
            for table in (self.spans, first_blocks, starts, lengths)
        )
        self._grid = BlockGrid(span_V, first_block_V, start_K, length_K, self.num_destinations)
        self.device = device

    def locate(self, indices: Sequence[Tensor]) -> Located:
        """Put the chosen positions of all parameters in the order of messages."""
        return locate(joined(indices).long(), list(map(Tensor.numel, indices)), self._grid)

    def pack(self, chosen: Sequence[Chosen], codec: Codec, *, seed: int) -> SparseMessage:
        """Write the messages. `seed` is for stochastic codecs; each parameter's section gets its own."""
        indices = [part.indices for part in chosen]
        located = self.locate(indices)
        values_E = joined([part.values for part in chosen])
        sorted_E = values_E if located.order is None else values_E.index_select(0, located.order)
        wires, sent, at = [], [], 0
        for destination, sizes in enumerate(located.sizes_DV):
            end = at + sum(sizes)
            encoded, decoded = self._encode(sorted_E[at:end], sizes, codec, seed, destination)
            wires.append(torch.cat([located.positions[POSITION_NBYTES * at : POSITION_NBYTES * end], encoded]))
            sent.append(decoded)
            at = end
        sent_E = joined(sent)
        if located.order is not None:
            sent_E = torch.empty_like(sent_E).index_copy_(0, located.order, sent_E)
        return SparseMessage(located.counts_DK, wires, entries_at(indices, sent_E))

    def _encode(
        self, values: Tensor, counts: Sequence[int], codec: Codec, seed: int, destination: int
    ) -> tuple[Tensor, Tensor]:
        """The values of one message as bytes, and what they decode to."""
        if isinstance(codec, DenseCodec):  # the bytes of a concatenation are the concatenated bytes
            sent = values.to(codec.fmt.torch_dtype)
            return sent.view(torch.uint8), sent.float()
        wires, decoded = [], []
        for name, part in zip(self.names, values.split(list(counts)), strict=True):
            if part.numel():
                wire = codec.encode(part.contiguous(), seed=seed ^ salt_of(name, destination))
                wires.append(wire)
                decoded.append(codec.decode_sum(wire[None], part.numel()))
        if not wires:
            return values.new_empty(0, dtype=torch.uint8), values
        return torch.cat(wires), torch.cat(decoded)

    def opened(self, messages_SB: Tensor) -> tuple[Tensor, Tensor]:
        """Split messages made by `SparseMessage.whole` into tables of counts and entries."""
        counts_SK = messages_SB[:, : self.table_nbytes].reshape(-1).clone().view(torch.int32)
        return counts_SK.view(len(messages_SB), self.num_blocks), messages_SB[:, self.table_nbytes :]

    def sizes(self, counts_SK: Tensor) -> list[list[int]]:
        """Number of entries of each parameter according to received tables of counts, one row per source.

        Raises:
            RuntimeError: A table has counts that no rank could have sent.
        """
        counts_SV = torch.zeros(counts_SK.shape[0], 1 + len(self.names), dtype=torch.int64, device=counts_SK.device)
        counts_SV[:, 0] = ((counts_SK < 0) | (counts_SK > self._grid.length_K)).sum(1)
        counts_SV[:, 1:].index_add_(1, self._view_of_block_K, counts_SK.long())
        rows: list[list[int]] = counts_SV.tolist()
        for source, row in enumerate(rows):
            if wrong := row[0]:
                raise damaged_message(f"table {source} of counts is impossible for {wrong} of {self.num_blocks} blocks")
        return [row[1:] for row in rows]

    def nbytes(self, sizes_V: Sequence[int], codec: Codec) -> int:
        """Bytes of a message with these numbers of entries."""
        if isinstance(codec, DenseCodec):
            return POSITION_NBYTES * (k := sum(sizes_V)) + codec.wire_nbytes(k)
        return sum(entries_nbytes(k, codec) for k in sizes_V)

    def positions(self, counts_K: Tensor, sizes_V: Sequence[int], wire: Tensor) -> list[Tensor]:
        """The positions in each parameter (or its row) that a message contains.

        Raises:
            RuntimeError: The message is too short for its table, or a position lies outside its parameter.
        """
        k = sum(sizes_V)
        if wire.numel() < POSITION_NBYTES * k:
            raise damaged_message(f"its table has {k} positions, but the message has {wire.numel()} bytes")
        found = positions(counts_K, wire, k, self._grid)
        if found is None:
            raise damaged_message("a position lies beyond the end of its parameter")
        return list(found.split(list(sizes_V)))

    def unpack(self, counts_K: Tensor, sizes_V: Sequence[int], wire: Tensor, codec: Codec) -> list[Chosen]:
        """The entries of each parameter (or its row) in one source's message.

        Args:
            counts_K: The source's table.
            sizes_V: Its row of `sizes`.
            wire: Its positions and values.
            codec: Encodes the values.

        Raises:
            RuntimeError: The message is damaged.
        """
        if wire.numel() != self.nbytes(sizes_V, codec):
            raise damaged_message(f"{self.nbytes(sizes_V, codec)} bytes were expected, {wire.numel()} arrived")
        indices = self.positions(counts_K, sizes_V, wire)
        values = self._decode(wire[POSITION_NBYTES * sum(sizes_V) :], sizes_V, codec)
        return entries_at(indices, values)

    def _decode(self, wire: Tensor, sizes_V: Sequence[int], codec: Codec) -> Tensor:
        if isinstance(codec, DenseCodec):
            return wire.clone().view(codec.fmt.torch_dtype).float()  # a clone is aligned
        values, at = [torch.empty(0, dtype=torch.float32, device=wire.device)], 0
        for k in sizes_V:
            if k:
                nbytes = codec.wire_nbytes(k)
                values.append(codec.decode_sum(wire[None, at : at + nbytes].contiguous(), k))
                at += nbytes
        return torch.cat(values)


def damaged_message(what: str) -> RuntimeError:
    """The error for a sparse message that does not fit its parameters."""
    return RuntimeError(
        f"a sparse message is damaged: {what}. The ranks run different models, compressors or versions of"
        " lowbit_strategy, or the network corrupts data: compare them, and restart from the last checkpoint"
    )


@lru_cache(maxsize=256)
def sparse_layout(
    names: tuple[str, ...], spans: tuple[int, ...], num_destinations: int, device: torch.device
) -> SparseLayout:
    """The layout of a bucket, cached because the same buckets occur in every step."""
    return SparseLayout(names, spans, num_destinations, device)


def layout_of(views: Sequence[ParamView], owners: int | None = None) -> SparseLayout:
    """The places of the views' parameters in sparse messages: one per owner, about its rows, or one for all (None)."""
    rows = [(view.spec.name, view.spec.numel if owners is None else view.row_numel) for view in views]
    names, spans = zip(*rows, strict=True)
    return sparse_layout(names, spans, owners or 1, views[0].x.device)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the parts; a single part is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def entries_at(indices: Sequence[Tensor], values_E: Tensor) -> list[Chosen]:
    """The entries of each parameter, taken from joined values."""
    return list(map(Chosen, indices, values_E.split(list(map(Tensor.numel, indices)))))
