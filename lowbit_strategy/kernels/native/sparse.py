"""The parts of a sparse step in C: same results as `lowbit_strategy.kernels.reference.sparse`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.native import function, isa
from lowbit_strategy.kernels.native.threads import run_on_elements
from lowbit_strategy.kernels.reference.sparse import BlockGrid, Located


def peak(x: Tensor) -> float:
    largest, name = function("lowbit_peak"), isa().encode()
    return max(run_on_elements(lambda start, stop: float(largest(name, x, start, stop)), x.numel()))


def locate(index_E: Tensor, sizes: Sequence[int], grid: BlockGrid) -> Located:
    num_messages, num_views, num_entries = grid.num_destinations, len(sizes), index_E.numel()
    counts_DK = torch.zeros(num_messages, grid.num_blocks, dtype=torch.int32)
    positions = torch.empty(2 * num_entries, dtype=torch.uint8)
    order = places = None
    if num_messages > 1:
        order = torch.empty(num_entries, dtype=torch.int64)
        places = torch.empty(num_messages, num_views, dtype=torch.int64)
    function("lowbit_locate")(
        index_E,
        (ctypes.c_int64 * num_views)(*sizes),
        grid.span_V,
        grid.first_block_V,
        num_views,
        grid.num_blocks,
        num_messages,
        counts_DK,
        positions,
        order,
        places,
    )
    return Located(order, counts_DK, positions, [list(sizes)] if places is None else places.tolist())


def positions(counts_K: Tensor, wire: Tensor, count: int, grid: BlockGrid) -> Tensor | None:
    found = torch.empty(count, dtype=torch.int64)
    damaged = function("lowbit_positions")(counts_K, grid.start_K, grid.length_K, grid.num_blocks, wire, count, found)
    return None if damaged else found


def take_out_(residual: Tensor, indices: Tensor, values: Tensor, sent: Tensor) -> None:
    function("lowbit_take_out")(residual, indices, values, sent, indices.numel())


def write_sum_(out: Tensor, parts: Sequence[tuple[Tensor, Tensor]], alpha: float) -> None:
    counts = [values.numel() for _, values in parts]
    pointers = ctypes.c_void_p * len(parts)
    room = torch.empty(sum(counts) if alpha != 1.0 else 0, dtype=torch.float32)
    function("lowbit_add_entries")(
        out.zero_(),
        pointers(*[indices.data_ptr() for indices, _ in parts]),
        pointers(*[values.data_ptr() for _, values in parts]),
        (ctypes.c_int64 * len(parts))(*counts),
        len(parts),
        alpha,
        room,
    )
