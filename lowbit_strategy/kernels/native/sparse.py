"""A sparse step's ops in C, with the same results as `lowbit_strategy.kernels.reference.sparse`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.native import function, isa, threads
from lowbit_strategy.kernels.reference.sparse import BlockGrid, Located


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    largest, name, found = function("lowbit_peak"), isa().encode(), []
    for x in tensors:
        work = functools.partial(largest, name, x.data_ptr())
        numel = x.numel()
        found.append(work(0, numel) if numel < 2 * threads.GRAIN else max(threads.run_on_elements(work, numel)))
    return found


def locate(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
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


def take_out_(residual: Tensor, indices: Tensor, values: Tensor, sent: Tensor) -> None:
    function("lowbit_take_out")(
        residual.data_ptr(), indices.data_ptr(), values.data_ptr(), sent.data_ptr(), indices.numel()
    )


def write_sum_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    counts, positions, values = [], [], []
    for index_E, value_E in parts:
        counts.append(value_E.numel())
        positions.append(index_E.data_ptr())
        values.append(value_E.data_ptr())
    pointers = ctypes.c_void_p * len(parts)
    room = torch.empty(sum(counts) if alpha != 1.0 else 0, dtype=torch.float32)
    function("lowbit_add_entries")(
        out.zero_().data_ptr(),
        pointers(*positions),
        pointers(*values),
        (ctypes.c_int64 * len(parts))(*counts),
        len(parts),
        alpha,
        room.data_ptr(),
    )
