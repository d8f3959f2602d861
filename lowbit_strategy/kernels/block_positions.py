"""Positions of entries on the wire: two bytes each in blocks of 65,536, and the number of entries in each block.
Results do not depend on the backend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import function

BLOCK_BITS = 16


class BlockGrid(NamedTuple):
    """Parameters one after the other, each (or each rank's row of it) cut into blocks of 65,536 positions.

    Args:
        span_V: int64, positions of each parameter, or of one rank's row of it.
        first_block_V: int64, the first block of each parameter.
        start_K: int64, where each block starts in its parameter (row).
        length_K: int64, positions of each block.
        num_destinations: 1, or one per row, each of which gets a message about its row.
    """

    span_V: Tensor
    first_block_V: Tensor
    start_K: Tensor
    length_K: Tensor
    num_destinations: int

    @property
    def num_blocks(self) -> int:
        return self.length_K.numel()


class Located(NamedTuple):
    """Entries of all parameters in the order of messages: by destination, then parameter, then position.

    Args:
        order: int64 [E], each entry's index in the parameters' concatenation; None: unchanged.
        counts_DK: int32, entries in each block, for each destination.
        positions: uint8 [2 * E]: in their blocks, two bytes each.
        sizes_DV: Entries of each parameter, for each destination.
    """

    order: Tensor | None
    counts_DK: Tensor
    positions: Tensor
    sizes_DV: list[list[int]]


def locate(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
    """Put entries in the order of messages.

    Args:
        index_E: int64 positions in the parameters, one parameter after the other, ascending in each.
        sizes: Number of entries of each parameter.
        grid: How parameters are cut.
    """
    find = _locate_in_c if is_native(index_E.device) else _locate_in_torch
    return find(index_E.contiguous(), sizes, grid)


def _locate_in_torch(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
    num_messages, num_views = grid.num_destinations, len(sizes)
    sizes_V = torch.tensor(sizes, device=index_E.device)
    view_E = torch.arange(num_views, device=index_E.device).repeat_interleave(sizes_V, output_size=sum(sizes))
    order, local_E, sizes_DV = None, index_E, [list(sizes)]
    first_E = grid.first_block_V.index_select(0, view_E)
    if num_messages > 1:
        span_E = grid.span_V.index_select(0, view_E)
        destination_E = index_E // span_E
        order = destination_E.argsort(stable=True)
        local_E = (index_E - destination_E * span_E).index_select(0, order)
        first_E = (first_E + destination_E * grid.num_blocks).index_select(0, order)
        places = torch.bincount(destination_E * num_views + view_E, minlength=num_messages * num_views)
        sizes_DV = places.view(num_messages, -1).tolist()
    counts = torch.bincount(first_E + (local_E >> BLOCK_BITS), minlength=num_messages * grid.num_blocks)
    positions = (local_E & 0xFFFF).to(torch.int16).view(torch.uint8)
    return Located(order, counts.to(torch.int32).view(num_messages, -1), positions, sizes_DV)


def _locate_in_c(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
    num_messages, num_views, num_entries = grid.num_destinations, len(sizes), index_E.numel()
    num_blocks = grid.start_K.numel()
    counts_DK = torch.zeros(num_messages, num_blocks, dtype=torch.int32)
    positions = torch.empty(2 * num_entries, dtype=torch.uint8)
    order = places = None
    if num_messages > 1:
        order = torch.empty(num_entries, dtype=torch.int64)
        places = torch.empty(num_messages, num_views, dtype=torch.int64)
    function("lowbit_locate")(
        index_E.data_ptr(),
        (ctypes.c_int64 * num_views)(*sizes),
        grid.span_V.data_ptr(),
        grid.first_block_V.data_ptr(),
        num_views,
        num_blocks,
        num_messages,
        counts_DK.data_ptr(),
        positions.data_ptr(),
        None if order is None else order.data_ptr(),
        None if places is None else places.data_ptr(),
    )
    return Located(order, counts_DK, positions, [list(sizes)] if places is None else places.tolist())


def positions(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    """Decode the positions at the start of a message, int64 [count], relative to their parameters; None if one is
    impossible.

    Args:
        counts_K: int32 number of entries in each block, not negative, `count` in total.
        wire: uint8, at least two bytes per entry.
        count: Total number of positions.
        grid: How parameters are cut.
    """
    read = _positions_in_c if is_native(wire.device) else _positions_in_torch
    return read(counts_K.contiguous(), wire.contiguous(), count, grid)


def _positions_in_torch(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    low_E = wire[: 2 * count].clone().view(torch.int16).long() & 0xFFFF
    block_E = torch.arange(grid.num_blocks, device=wire.device).repeat_interleave(counts_K, output_size=count)
    if bool((low_E >= grid.length_K.index_select(0, block_E)).any()):
        return None
    return grid.start_K.index_select(0, block_E) + low_E


def _positions_in_c(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    found = torch.empty(count, dtype=torch.int64)
    start_K, length_K = grid.start_K, grid.length_K
    damaged = function("lowbit_positions")(
        counts_K.data_ptr(),
        start_K.data_ptr(),
        length_K.data_ptr(),
        start_K.numel(),
        wire.data_ptr(),
        count,
        found.data_ptr(),
    )
    return None if damaged else found
