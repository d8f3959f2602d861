"""Selection by magnitude in C: same results as `lowbit_strategy.kernels.reference.select`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowbit_strategy.kernels.native import isa
from lowbit_strategy.kernels.native.functions import function
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.reference.rng import hash32

_BLOCK = 4096  # parts of a tensor that threads take start on multiples of it


def _select(x: Tensor, start: int, stop: int, threshold: float, capacity: int) -> tuple[int, Tensor, Tensor]:
    indices = torch.empty(capacity, dtype=torch.int32)
    values = torch.empty(capacity, dtype=torch.float32)
    count = function("lowbit_select")(
        isa().encode(), x.data_ptr(), start, stop, threshold, indices.data_ptr(), values.data_ptr(), capacity
    )
    return int(count), indices, values


def sample_magnitudes(x: Tensor, num: int, seed: int, addend: Tensor | None) -> Tensor:
    magnitudes = torch.empty(num, dtype=torch.float32)
    function("lowbit_sample_magnitudes")(
        x.data_ptr(),
        None if addend is None else addend.data_ptr(),
        x.numel(),
        num,
        hash32(seed),
        magnitudes.data_ptr(),
    )
    return magnitudes


def chunk_top_k(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    kept_M = kept_M.contiguous()

    def work(first: int, last: int) -> None:
        function("lowbit_chunk_top_k")(
            isa().encode(),
            x.data_ptr(),
            first,
            last,
            kept_M.data_ptr(),
            positions_MK.shape[1],
            positions_MK.data_ptr(),
            values_MK.data_ptr(),
        )

    run(work, kept_M.numel(), _BLOCK)


def top_k_(x: Tensor, addend: Tensor | None, k: int, groups: int) -> tuple[tuple[Tensor, Tensor] | None, bool]:
    """What is found, or None where another way must be taken, and whether all numbers are finite; `x` has the sums."""
    capacity = 8 * k + 1024
    scratch = torch.empty(groups + 3 * capacity, dtype=torch.int32)
    positions, values = torch.empty(k, dtype=torch.int64), torch.empty(k, dtype=torch.float32)
    count = function("lowbit_top_k")(
        isa().encode(),
        x.data_ptr(),
        None if addend is None else addend.data_ptr(),
        x.numel(),
        k,
        groups,
        scratch.data_ptr(),
        capacity,
        positions.data_ptr(),
        values.data_ptr(),
    )
    return (positions, values) if count == k else None, count != -2


def select_above(x: Tensor, threshold: float, expected: int | None) -> tuple[Tensor, Tensor]:
    numel = x.numel()
    share = (numel // 64 if expected is None else expected + expected // 2) / max(numel, 1)

    def work(first: int, last: int) -> tuple[Tensor, Tensor]:
        start, stop = first * _BLOCK, min(last * _BLOCK, numel)
        capacity = min(stop - start, int(share * (stop - start)) + 1024)
        count, indices, values = _select(x, start, stop, threshold, capacity)
        if count > capacity:
            count, indices, values = _select(x, start, stop, threshold, count)
        return indices[:count], values[:count]

    return _joined(run(work, -(-numel // _BLOCK), _BLOCK))


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([indices for indices, _ in parts]), torch.cat([values for _, values in parts])


def add_select_(x: Tensor, addend: Tensor, threshold: float, expected: int) -> tuple[Tensor, Tensor, bool]:
    numel = x.numel()
    share, add_select, name = (expected + expected // 2) / max(numel, 1), function("lowbit_add_select"), isa().encode()

    def work(first: int, last: int) -> tuple[Tensor, Tensor, bool]:
        start, stop = first * _BLOCK, min(last * _BLOCK, numel)
        capacity = min(stop - start, int(share * (stop - start)) + 1024)
        indices, values = torch.empty(capacity, dtype=torch.int32), torch.empty(capacity, dtype=torch.float32)
        found, nonfinite = (indices.data_ptr(), values.data_ptr(), capacity), ctypes.c_int32()
        span = (start, stop, threshold)
        count = add_select(name, x.data_ptr(), addend.data_ptr(), *span, *found, ctypes.byref(nonfinite))
        if count > capacity:
            count, indices, values = _select(x, start, stop, threshold, count)
        return indices[:count], values[:count], not nonfinite.value

    parts = run(work, -(-numel // _BLOCK), _BLOCK)
    if len(parts) == 1:
        return parts[0]
    return *_joined([part[:2] for part in parts]), all(finite for _, _, finite in parts)


def count_above(x: Tensor, threshold: float) -> int:
    def work(first: int, last: int) -> int:
        return _select(x, first * _BLOCK, min(last * _BLOCK, x.numel()), threshold, 0)[0]

    return sum(run(work, -(-x.numel() // _BLOCK), _BLOCK))
