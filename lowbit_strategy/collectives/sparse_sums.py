"""Sums of sparse messages, as generators. Every rank adds in float32, in rank order.

If each rank chooses its own positions (`exchange_entries`), all ranks hold the same bits, which depend neither on the
bucket nor on the backend's algorithm (`lowbit_strategy.kernels.sparse.write_sum_`).

If all ranks have the same positions (`sum_values`), neither positions nor counts are sent.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, Pending, gather_uneven, scatter_uneven
from lowbit_strategy.collectives.layout import ALIGNMENT, round_up
from lowbit_strategy.collectives.ordered import add_rows_, ordered_nbytes, sum_ordered
from lowbit_strategy.collectives.sparse_layout import (
    Chosen,
    SparseLayout,
    SparseMessage,
    counts_nbytes,
    entries_at,
    entries_nbytes,
    joined,
)

_MULTIPLE = ALIGNMENT // 4  # in floats: each share of a parameter starts on a multiple
Received = Generator[Pending, None, list[list[Chosen]]]


def exchange_entries(
    message: SparseMessage, layout: SparseLayout, codec: Codec, comm: Comm, *, same_counts: bool
) -> Received:
    """Send every rank's entries to the ranks that sum them.

    all-reduce: (1) all-gather of the tables of counts; (2) all-gather of positions and values, padded to the longest.
    reduce-scatter: all-to-alls of the same; each owner gets only entries of its rows. A single rank exchanges nothing.

    Args:
        message: What `SparseLayout.pack` has returned.
        layout: The places of parameters in messages.
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


def _scatter(message: SparseMessage, layout: SparseLayout, codec: Codec, comm: Comm) -> Received:
    counts_SK = torch.empty_like(message.counts_DK)
    yield comm.all_to_all(counts_SK, message.counts_DK)
    sizes_SV = layout.sizes(counts_SK)
    lengths = [layout.nbytes(sizes_V, codec) for sizes_V in sizes_SV]
    wires = yield from scatter_uneven(message.wires, comm, lengths)
    return _unpack(layout, codec, counts_SK, sizes_SV, wires)


def _gather_same(message: SparseMessage, layout: SparseLayout, codec: Codec, comm: Comm) -> Received:
    own = message.whole
    received = torch.empty(comm.world_size, own.numel(), dtype=torch.uint8, device=layout.device)
    yield comm.all_gather(received, own)
    counts_SK, wires_SB = layout.opened(received)
    return _unpack(layout, codec, counts_SK, layout.sizes(counts_SK), wires_SB.unbind())


def _unpack(
    layout: SparseLayout, codec: Codec, counts_SK: Tensor, sizes_SV: Sequence[Sequence[int]], wires: Sequence[Tensor]
) -> list[list[Chosen]]:
    return [layout.unpack(*source, codec) for source in zip(counts_SK, sizes_SV, wires, strict=True)]


def entries_sum_nbytes(numel: int, count: int, codec: Codec, world_size: int, *, sharded: bool) -> int:
    """Bytes that one rank sends in `exchange_entries` for one parameter, if entries are spread evenly over the owners.

    Exact under all-reduce if all ranks have equal numbers of entries.
    """
    owners = world_size if sharded else 1
    message = counts_nbytes(-(-numel // owners)) + entries_nbytes(-(-count // owners), codec)
    return message * (world_size - 1)


def sum_values(
    chosen: Sequence[Chosen], rows: Sequence[int] | None, comm: Comm
) -> Generator[Pending, None, list[Chosen]]:
    """Sum values at positions that all ranks share, and return the sums at their places in the result.

    All-reduce: by `sum_ordered`. Reduce-scatter: one all-to-all, in which each rank gets the values of its rows.

    Args:
        chosen: The entries of each parameter, at the same positions on all ranks.
        rows: Reduce-scatter: elements of each parameter's rows. None: all-reduce.
        comm: Ranks to sum over.
    """
    indices = [part.indices for part in chosen]
    values_E = joined([part.values for part in chosen])
    if rows is None:
        return entries_at(indices, (yield from sum_ordered(values_E, comm)))
    world_size, rank = comm.world_size, comm.rank
    number = torch.arange(world_size + 1, device=values_E.device)
    edges = torch.stack([torch.searchsorted(index, number * row) for index, row in zip(indices, rows, strict=True)])
    counts = edges.diff().tolist()  # each parameter's number of values for each rank
    parts = values_E.split([count for counts_W in counts for count in counts_W])
    by_rank = [part for r in range(world_size) for part in parts[r::world_size]]
    padded = [[round_up(counts_W[r], _MULTIPLE) for counts_W in counts] for r in range(world_size)]
    sent = [sum(sizes) for sizes in padded]
    message = values_E.new_zeros(sum(sent))
    rooms = message.split([size for sizes in padded for size in sizes])
    places = [room[: part.numel()] for room, part in zip(rooms, by_rank, strict=True)]
    torch._foreach_copy_(places, by_rank)
    received_WN = message.new_empty(world_size, sent[rank])
    yield comm.all_to_all_uneven(received_WN.view(-1), message, sent[rank : rank + 1] * world_size, sent)
    total_N = torch.empty_like(received_WN[0])
    add_rows_(received_WN, total_N)
    own = [index.split(counts_W)[rank] - rank * row for index, counts_W, row in zip(indices, counts, rows, strict=True)]
    sums = total_N.split(padded[rank])
    return [Chosen(index, sum_N[: index.numel()]) for index, sum_N in zip(own, sums, strict=True)]


def value_sum_nbytes(count: int, world_size: int, *, sharded: bool) -> int:
    """Bytes that one rank sends for `count` values of a parameter, spread evenly over the owners."""
    if not sharded:
        return ordered_nbytes(count, 4, world_size)
    return round_up(4 * -(-count // world_size), ALIGNMENT) * (world_size - 1)
