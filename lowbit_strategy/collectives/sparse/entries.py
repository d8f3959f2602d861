"""Sparse all-reduce and reduce-scatter of entries that each rank chose by itself, as generators.

Every rank adds what came in float32 in rank order, position by position (`lowbit_strategy.kernels.sparse.write_sum_`):
all hold the same bits, and the bits depend neither on the bucket nor on the backend's algorithm.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.sparse.layout import Chosen, Message, SparseLayout, counts_nbytes, entries_nbytes
from lowbit_strategy.collectives.uneven import gather_uneven, scatter_uneven

Received = Generator[Pending, None, list[list[Chosen]]]


def exchange_entries(
    message: Message, layout: SparseLayout, codec: Codec, comm: Comm, *, same_counts: bool
) -> Received:
    """Every rank's entries reach the ranks that sum them.

    all-reduce: (1) all-gather of the tables of counts; (2) all-gather of positions and values, padded to the longest.
    reduce-scatter: all-to-alls of the same; each owner gets only what concerns its rows. One rank alone has them.

    Args:
        message: What `SparseLayout.pack` has returned.
        layout: Says where parameters stand in messages.
        codec: Decodes the values.
        comm: Group to exchange over.
        same_counts: All ranks have equal numbers of entries for every parameter: one all-gather is enough.

    Returns:
        For each rank in order, its entries of each parameter (under reduce-scatter: of the own rows).

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
    """What one rank sends to others in `exchange_entries` for one parameter, entries evenly spread over the owners.

    Exact under all-reduce where all ranks have equal numbers of entries.
    """
    others = world_size - 1
    if not scatter:
        return others * (counts_nbytes(numel) + entries_nbytes(count, codec))
    row = -(-numel // world_size)
    return others * (counts_nbytes(row) + entries_nbytes(-(-count // world_size), codec))
