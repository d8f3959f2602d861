"""Selection by magnitude in C, with the same results as `lowbit_strategy.kernels.reference.select`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowbit_strategy.kernels.native import function, isa, threads
from lowbit_strategy.kernels.reference.rng import hash32


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def sample_magnitudes(x: Tensor, num: int, seed: int, addend: Tensor | None) -> Tensor:
    magnitudes = torch.empty(num, dtype=torch.float32)
    function("lowbit_sample_magnitudes")(
        x.data_ptr(), _address(addend), x.numel(), num, hash32(seed), magnitudes.data_ptr()
    )
    return magnitudes


def top_k_(x: Tensor, addend: Tensor | None, k: int, groups: int) -> tuple[tuple[Tensor, Tensor] | None, bool]:
    """The k largest, or None if another way is needed, and whether all numbers are finite; `x` has the sums."""
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
    """Positions and values (of the sums, if there is an addend), and whether all sums are finite; `x` has the sums."""
    numel, name = x.numel(), isa().encode()
    share = (numel // 64 if expected is None else expected + expected // 2) / max(numel, 1)

    def work(start: int, stop: int) -> tuple[Tensor, Tensor, bool]:
        room, added, nonfinite = min(stop - start, int(share * (stop - start)) + 1024), addend, ctypes.c_int32()
        while True:  # no recursion: a self-referencing function keeps its tensors until garbage collection
            indices, values = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.float32)
            arguments = start, stop, threshold, indices.data_ptr(), values.data_ptr(), room
            if added is None:
                count = function("lowbit_select")(name, x.data_ptr(), *arguments)
            else:
                add_select = function("lowbit_add_select")
                count = add_select(name, x.data_ptr(), added.data_ptr(), *arguments, ctypes.byref(nonfinite))
            if count <= room:
                return indices[:count], values[:count], not nonfinite.value
            room, added = count, None  # more than expected: by now x has the sums

    if numel < 2 * threads.GRAIN:
        return work(0, numel)
    parts = threads.run_on_elements(work, numel)
    indices, values, finite = zip(*parts, strict=True)
    return torch.cat(indices), torch.cat(values), all(finite)
