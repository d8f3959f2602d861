"""Sums of sparse messages, as generators. Every rank adds in float32, in rank order.

If each rank chooses its own positions (`exchange_entries`), all ranks hold the same bits, which depend neither on the
bucket nor on the backend's algorithm (`lowbit_strategy.kernels.sparse.write_sum_`).

If all ranks have the same positions (`ValueSum`), neither positions nor counts are sent. Floats are summed as they are,
by `sum_ordered`. With a codec, and under reduce-scatter:

1. every rank encodes its values for the ranks that sum them: under all-reduce rank r sums the r-th part of each
   parameter's values, under reduce-scatter those of its own rows
2. one all-to-all; each rank decodes and adds in float32 in rank order
3. all-reduce only: each rank encodes its sums, one all-gather, all ranks decode

With a lossy codec both hops have an error: the first is the sender's, the second the summing rank's. Both are returned,
so that error feedback can keep them.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, DenseCodec, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending, gather_uneven, scatter_uneven
from lowbit_strategy.collectives.layout import ALIGNMENT, round_up, salt_of
from lowbit_strategy.collectives.ordered import ordered_nbytes, sum_ordered
from lowbit_strategy.collectives.sparse_layout import (
    Chosen,
    Message,
    SparseLayout,
    counts_nbytes,
    entries_at,
    entries_nbytes,
    joined,
)
from lowbit_strategy.kernels.reference.rng import hash32
from lowbit_strategy.kernels.segments import Segment, Segments

Received = Generator[Pending, None, list[list[Chosen]]]


def exchange_entries(
    message: Message, layout: SparseLayout, codec: Codec, comm: Comm, *, same_counts: bool
) -> Received:
    """Send every rank's entries to the ranks that sum them.

    all-reduce: (1) all-gather of the tables of counts; (2) all-gather of positions and values, padded to the longest.
    reduce-scatter: all-to-alls of the same; each owner gets only entries of its rows. A single rank exchanges nothing.

    Args:
        message: What `SparseLayout.pack` has returned.
        layout: Gives the places of parameters in messages.
        codec: Decodes the values.
        comm: Ranks to exchange with.
        same_counts: Whether all ranks have equal numbers of entries for every parameter, so that one all-gather is
            enough.

    Returns:
        For each rank in order, its entries of each parameter (under reduce-scatter: of this rank's rows).

    Raises:
        RuntimeError: A received message is damaged.
    """
    if comm.world_size == 1:
        return [message.sent]
    if layout.num_destinations > 1:
        return (yield from _scatter(message, layout, codec, comm))
    if same_counts:
        return (yield from _gather_same(message, layout, codec, comm))
    counts_SK = torch.empty(comm.world_size, layout.num_blocks, dtype=torch.int32, device=layout.device)
    yield comm.all_gather(counts_SK, message.counts_DK[0])
    sizes_SV = layout.sizes(counts_SK)
    lengths = [layout.nbytes(sizes_V, codec) for sizes_V in sizes_SV]
    wires = yield from gather_uneven(message.wires[0], comm, lengths)
    return _unpack(layout, codec, counts_SK, sizes_SV, wires)


def _scatter(message: Message, layout: SparseLayout, codec: Codec, comm: Comm) -> Received:
    counts_SK = torch.empty_like(message.counts_DK)
    yield comm.all_to_all(counts_SK, message.counts_DK)
    sizes_SV = layout.sizes(counts_SK)
    lengths = [layout.nbytes(sizes_V, codec) for sizes_V in sizes_SV]
    wires = yield from scatter_uneven(message.wires, comm, lengths)
    return _unpack(layout, codec, counts_SK, sizes_SV, wires)


def _gather_same(message: Message, layout: SparseLayout, codec: Codec, comm: Comm) -> Received:
    own = message.whole
    received = torch.empty(comm.world_size, own.numel(), dtype=torch.uint8, device=layout.device)
    yield comm.all_gather(received, own)
    counts_SK, wires_SB = layout.opened(received)
    return _unpack(layout, codec, counts_SK, layout.sizes(counts_SK), wires_SB.unbind())


def _unpack(
    layout: SparseLayout, codec: Codec, counts_SK: Tensor, sizes_SV: Sequence[Sequence[int]], wires: Sequence[Tensor]
) -> list[list[Chosen]]:
    return [layout.unpack(*source, codec) for source in zip(counts_SK, sizes_SV, wires, strict=True)]


def entries_sum_nbytes(numel: int, count: int, codec: Codec, world_size: int, *, scatter: bool) -> int:
    """Bytes that one rank sends in `exchange_entries` for one parameter, if entries are spread evenly over the owners.

    Exact under all-reduce if all ranks have equal numbers of entries.
    """
    others = world_size - 1
    if not scatter:
        return others * (counts_nbytes(numel) + entries_nbytes(count, codec))
    row = -(-numel // world_size)
    return others * (counts_nbytes(row) + entries_nbytes(-(-count // world_size), codec))


_FLOATS = DenseCodec("float32")


class ValueSum:
    """One sum of values: it encodes them when it is made, and exchanges them in `run`.

    Args:
        names: Names of the parameters.
        chosen: The entries of each parameter, at the same positions on all ranks.
        rows: Reduce-scatter: elements of each parameter's rows. None: all-reduce.
        codec: Encodes the values.
        comm: Ranks to sum over.
        step: Stochastic codecs round with its seed.

    Attributes:
        sent: Receives this rank's values of each parameter as the other ranks decode them.
    """

    def __init__(
        self,
        names: Sequence[str],
        chosen: Sequence[Chosen],
        rows: Sequence[int] | None,
        codec: Codec,
        comm: Comm,
        *,
        step: StepContext,
    ) -> None:
        self.codec, self.comm, self.step = codec, comm, step
        self.indices, self.rows = [part.indices for part in chosen], rows
        self.counts = [index.numel() for index in self.indices]
        self.exact = codec == _FLOATS
        self._values_E = joined([part.values for part in chosen])
        self.device = self._values_E.device
        if self.exact and rows is None:
            self.sent = [part.values for part in chosen]
            return
        self._tables(names, self._edges())
        self._wire = torch.zeros(sum(self.row_nbytes), dtype=torch.uint8, device=self.device)
        self._encode_(self._values_E, self._wire, self._all)
        sent_E = self._values_E if self.exact else self._decode(self._wire[None], self._all, sum(self.counts))
        self.sent = list(sent_E.split(self.counts))

    def _edges(self) -> list[list[int]]:
        """The boundaries of the ranks' shares of each parameter's values."""
        world_size, counts = self.comm.world_size, self.counts
        if self.rows is None:
            rows = [round_up(-(-k // world_size), self.codec.block_size) for k in counts]
            return [[min(r * row, k) for r in range(world_size + 1)] for row, k in zip(rows, counts, strict=True)]
        rows_V = torch.tensor(self.rows, device=self.device)
        counts_V = torch.tensor(counts, device=self.device)
        view_E = torch.arange(len(counts), device=self.device).repeat_interleave(counts_V, output_size=sum(counts))
        share_E = view_E * world_size + joined(self.indices) // rows_V.index_select(0, view_E)
        shares_V = torch.bincount(share_E, minlength=len(counts) * world_size).view(-1, world_size).tolist()
        return [list(itertools.accumulate(shares, initial=0)) for shares in shares_V]

    def _tables(self, names: Sequence[str], edges_V: Sequence[Sequence[int]]) -> None:
        """Segments of all messages and of this rank's share. An all-reduce's messages all have the first one's size."""
        everything, own, at, own_at = [], [], 0, 0
        self.row_nbytes, self.own_places = [], []
        for r in range(self.comm.world_size):
            row_start, start = at, 0
            for name, edges, k in zip(names, edges_V, self.counts, strict=True):
                length = edges[r + 1] - edges[r]
                if length:
                    salt = salt_of(name, r)
                    everything.append(Segment(start + edges[r], length, 0, at, salt))
                if r == self.comm.rank:
                    self.own_places.append(slice(edges[r], edges[r + 1]))
                    if length:
                        own.append(Segment(own_at, length, 0, at - row_start, hash32(salt)))
                    own_at += length
                start += k
                room = edges[1] if self.rows is None else length
                at += round_up(self.codec.wire_nbytes(room), ALIGNMENT) if room else 0
            self.row_nbytes.append(at - row_start)
        self._all, self._own, self._own_numel = Segments(everything), Segments(own), own_at

    def _encode_(self, values: Tensor, wire: Tensor, segments: Segments) -> None:
        if segments.rows:
            flag = torch.zeros(1, dtype=torch.int32, device=self.device)
            self.codec.encode_(values, wire, segments, {}, self.step, flag)

    def _decode(self, wire_WB: Tensor, segments: Segments, numel: int) -> Tensor:
        out = torch.zeros(numel, dtype=torch.float32, device=self.device)
        if segments.rows:
            self.codec.decode_sum_(wire_WB, out, segments, {}, 1.0)
        return out

    def run(self) -> Generator[Pending, None, tuple[list[Chosen], list[Chosen]]]:
        """For each parameter, return the sums over ranks at their places in the result (reduce-scatter: in this rank's
        row), and the error of this rank's encoding of its sums at flat positions of the parameter, empty if there is
        none.
        """
        if self.exact and self.rows is None:
            sums_E = yield from sum_ordered(self._values_E, self.comm)
            return entries_at(self.indices, sums_E), []
        comm, world_size, own_nbytes = self.comm, self.comm.world_size, self.row_nbytes[self.comm.rank]
        received_WB = torch.empty(world_size, own_nbytes, dtype=torch.uint8, device=self.device)
        if self.rows is not None:
            yield comm.all_to_all_uneven(received_WB.view(-1), self._wire, [own_nbytes] * world_size, self.row_nbytes)
        else:
            yield comm.all_to_all(received_WB, self._wire.view(world_size, -1))
        own_sums = self._decode(received_WB, self._own, self._own_numel)
        own_indices = [index[place] for index, place in zip(self.indices, self.own_places, strict=True)]
        if self.rows is not None:
            starts = [comm.rank * row_numel for row_numel in self.rows]
            local = [index - start for index, start in zip(own_indices, starts, strict=True)]
            return entries_at(local, own_sums), []
        message = torch.zeros(own_nbytes, dtype=torch.uint8, device=self.device)
        self._encode_(own_sums, message, self._own)
        gathered_WB = torch.empty_like(received_WB)
        yield comm.all_gather(gathered_WB, message)
        sums_E = self._decode(gathered_WB.view(1, -1), self._all, sum(self.counts))
        lost = (own_sums - self._decode(message[None], self._own, self._own_numel)).nan_to_num_(0.0, 0.0, 0.0)
        return entries_at(self.indices, sums_E), entries_at(own_indices, lost)


def value_sum_nbytes(count: int, codec: Codec, world_size: int, *, scatter: bool) -> int:
    """Bytes that one rank sends for `count` values of a parameter, spread evenly over the owners."""
    if codec == _FLOATS and not scatter:
        return ordered_nbytes(count, 4, world_size)
    row = -(-count // world_size)
    row = row if scatter else min(count, round_up(row, codec.block_size))
    hop = round_up(codec.wire_nbytes(row), ALIGNMENT) * (world_size - 1) if row else 0
    return hop if scatter else 2 * hop
