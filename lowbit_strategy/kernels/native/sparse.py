"""A sparse step's ops in C, with the same results as `lowbit_strategy.kernels.reference.sparse`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.native import function, isa, run_on_elements
from lowbit_strategy.kernels.reference.rng import hash32
from lowbit_strategy.kernels.reference.sparse import BlockGrid, Located


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def sample_magnitudes(x: Tensor, num: int, seed: int, addend: Tensor | None) -> Tensor:
    magnitudes = torch.empty(num, dtype=torch.float32)
    function("lowbit_sample_magnitudes")(
        x.data_ptr(), _address(addend), x.numel(), num, hash32(seed), magnitudes.data_ptr()
    )
    return magnitudes


def top_k_(x: Tensor, addend: Tensor | None, k: int, groups: int) -> tuple[tuple[Tensor, Tensor] | None, bool]:
    """What is found, or None where another way must be taken, and whether all numbers are finite; `x` has the sums."""
    capacity = 8 * k + 1024
    scratch = torch.empty(groups + 3 * capacity, dtype=torch.int32)
    positions, values = torch.empty(k, dtype=torch.int64), torch.empty(k, dtype=torch.float32)
    count = function("lowbit_top_k")(
        isa().encode(),
        x.data_ptr(),
        _address(addend),
        x.numel(),
        k,
        groups,
        scratch.data_ptr(),
        capacity,
        positions.data_ptr(),
        values.data_ptr(),
    )
    return (positions, values) if count == k else None, count != -2


def select_above(
    x: Tensor, threshold: float, expected: int | None, addend: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Positions and values, of the sums if there is an addend, and whether all sums are finite; `x` has them."""
    numel, name = x.numel(), isa().encode()
    share = (numel // 64 if expected is None else expected + expected // 2) / max(numel, 1)

    def work(start: int, stop: int) -> tuple[Tensor, Tensor, bool]:
        room, added, nonfinite = min(stop - start, int(share * (stop - start)) + 1024), addend, ctypes.c_int32()
        while True:  # no recursion: a function that refers to itself keeps its tensors until garbage is collected
            indices, values = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.float32)
            arguments = start, stop, threshold, indices.data_ptr(), values.data_ptr(), room
            if added is None:
                count = function("lowbit_select")(name, x.data_ptr(), *arguments)
            else:
                add_select = function("lowbit_add_select")
                count = add_select(name, x.data_ptr(), added.data_ptr(), *arguments, ctypes.byref(nonfinite))
            if count <= room:
                return indices[:count], values[:count], not nonfinite.value
            room, added = count, None  # more than expected: x has the sums now

    if numel < 2 * native.GRAIN:
        return work(0, numel)
    parts = run_on_elements(work, numel)
    indices, values, finite = zip(*parts, strict=True)
    return torch.cat(indices), torch.cat(values), all(finite)


def peaks(tensors: Sequence[Tensor]) -> list[float]:
    largest, name, found = function("lowbit_peak"), isa().encode(), []
    for x in tensors:
        work = functools.partial(largest, name, x.data_ptr())
        numel = x.numel()
        found.append(work(0, numel) if numel < 2 * native.GRAIN else max(run_on_elements(work, numel)))
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
