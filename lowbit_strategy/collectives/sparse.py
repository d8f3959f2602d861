"""Sparse all-reduce and reduce-scatter, as generators that yield whenever bytes travel.

Sums are formed in float32 in rank order, position by position: all ranks hold the same bits, and the bits depend
neither on the bucket nor on the backend's algorithm.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.ordered import sum_ordered
from lowbit_strategy.collectives.sparse_layout import (
    COUNT_NBYTES,
    Message,
    SparseLayout,
    counts_nbytes,
    entries_nbytes,
)

Exchanging = Generator[Pending, None, Tensor]
_FLOAT_NBYTES = 4


def sum_entries(message: Message, layout: SparseLayout, codec: Codec, comm: Comm, *, same_counts: bool) -> Exchanging:
    """Every rank's own entries, summed: each rank chose its own positions.

    all-reduce: (1) all-gather of the tables of counts; (2) uneven all-gather of positions and values; (3) sum.
    reduce-scatter: the same with all-to-alls; each owner gets only what concerns its rows.

    Args:
        message: From `SparseLayout.pack`.
        layout: Of the bucket.
        codec: Of the values.
        comm: Group to sum over.
        same_counts: All ranks have as many entries for every parameter: one all-gather does it all.

    Returns:
        The sum, float32 [layout.numel]: all parameters, or under reduce-scatter the own rows.
    """
    if same_counts and layout.num_destinations == 1:
        return (yield from _gather_same(message, layout, codec, comm))
    if layout.num_destinations == 1:
        counts_DB = message.counts_DB.expand(comm.world_size, -1).contiguous()
        wires = message.wires * comm.world_size
    else:
        counts_DB, wires = message.counts_DB, message.wires
    counts_SB = torch.empty_like(counts_DB)
    yield comm.all_to_all(counts_SB, counts_DB)
    sizes = layout.nbytes(counts_SB, codec)
    received = torch.empty(sum(sizes), dtype=torch.uint8, device=layout.device)
    yield comm.all_to_all_uneven(received, torch.cat(wires), sizes, [wire.numel() for wire in wires])
    total = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
    for counts_B, wire in zip(counts_SB, received.split(sizes), strict=True):
        layout.add_(total, counts_B, wire, codec)
    return total


def _gather_same(message: Message, layout: SparseLayout, codec: Codec, comm: Comm) -> Exchanging:
    table_nbytes = COUNT_NBYTES * layout.num_blocks
    own = torch.cat([message.counts_DB[0].view(torch.uint8), message.wires[0]])
    received = torch.empty(comm.world_size, own.numel(), dtype=torch.uint8, device=layout.device)
    yield comm.all_gather(received, own)
    total = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
    for row in received:
        counts_B = row[:table_nbytes].clone().view(torch.int32)
        layout.add_(total, counts_B, row[table_nbytes:], codec)
    return total


def sum_values(values: Sequence[Tensor], indices: Sequence[Tensor], layout: SparseLayout, comm: Comm) -> Exchanging:
    """Values at positions that all ranks chose alike: no position and no count travels.

    all-reduce: each rank sums a part of the values in rank order, and an all-gather brings the parts together.
    reduce-scatter: each owner gets the values at its positions.

    Args:
        values: Of each parameter, float32 [k].
        indices: Of each parameter, int64 [k], ascending, the same on all ranks.
        layout: Of the bucket.
        comm: Group to sum over.

    Returns:
        The sum, float32 [layout.numel], zero where nothing was said.
    """
    located = layout.locate(indices)
    total = torch.zeros(layout.numel, dtype=torch.float32, device=layout.device)
    flat_K, values_K = layout.flat(located), torch.cat(list(values))
    if layout.num_destinations == 1:
        if values_K.numel():
            total.index_copy_(0, flat_K, (yield from sum_ordered(values_K, comm)))
        return total
    sizes = [sum(counts) for counts in located.counts_DV]
    own = sizes[comm.rank]
    received = torch.empty(own * comm.world_size, dtype=torch.float32, device=layout.device)
    assert located.order is not None
    sent_K = values_K.index_select(0, located.order)
    yield comm.all_to_all_uneven(received, sent_K, [own] * comm.world_size, sizes)
    at = sum(sizes[: comm.rank])
    return total.index_copy_(0, flat_K[at : at + own], add_rows(received.view(comm.world_size, own)))


def add_rows(rows_WK: Tensor) -> Tensor:
    """Sum over rows, first to last: ``Tensor.sum`` may group them otherwise."""
    total = rows_WK[0].clone()
    for row in rows_WK[1:]:
        total += row
    return total


def sum_entries_nbytes(numel: int, count: int, codec: Codec, world_size: int, *, scatter: bool) -> int:
    """What one rank hands to others in `sum_entries` for one parameter, entries evenly spread over the owners.

    Exact under all-reduce.
    """
    others = world_size - 1
    if not scatter:
        return others * (counts_nbytes(numel) + entries_nbytes(count, codec))
    row = -(-numel // world_size)
    return others * (counts_nbytes(row) + entries_nbytes(-(-count // world_size), codec))


def sum_values_nbytes(count: int, world_size: int, *, scatter: bool) -> int:
    """What one rank hands to others in `sum_values` for `count` values, evenly spread over the owners."""
    hop = _FLOAT_NBYTES * -(-count // world_size) * (world_size - 1)
    return hop if scatter else 2 * hop
