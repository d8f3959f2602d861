"""Selection by magnitude in C: same results as `lowbit_strategy.kernels.reference.select`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowbit_strategy.kernels.native import function, isa, threads
from lowbit_strategy.kernels.native.threads import run, run_on_elements
from lowbit_strategy.kernels.reference.rng import hash32

_CHUNK = 4096


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def sample_magnitudes(x: Tensor, num: int, seed: int, addend: Tensor | None) -> Tensor:
    magnitudes = torch.empty(num, dtype=torch.float32)
    function("lowbit_sample_magnitudes")(
        x.data_ptr(), _address(addend), x.numel(), num, hash32(seed), magnitudes.data_ptr()
    )
    return magnitudes


def chunk_top_k(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    kept_M, room = kept_M.contiguous(), positions_MK.shape[1]
    choose, name = function("lowbit_chunk_top_k"), isa().encode()
    addresses = kept_M.data_ptr(), room, positions_MK.data_ptr(), values_MK.data_ptr()
    run(lambda first, last: choose(name, x.data_ptr(), first, last, *addresses), kept_M.numel(), _CHUNK)


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

    def work(start: int, stop: int, addend: Tensor | None = addend, room: int = 0) -> tuple[Tensor, Tensor, bool]:
        room = room or min(stop - start, int(share * (stop - start)) + 1024)
        indices, values = torch.empty(room, dtype=torch.int32), torch.empty(room, dtype=torch.float32)
        arguments, nonfinite = (start, stop, threshold, indices.data_ptr(), values.data_ptr(), room), ctypes.c_int32()
        if addend is None:
            count = function("lowbit_select")(name, x.data_ptr(), *arguments)
        else:
            add_select = function("lowbit_add_select")
            count = add_select(name, x.data_ptr(), addend.data_ptr(), *arguments, ctypes.byref(nonfinite))
        if count > room:  # more than expected: x has the sums now
            indices, values, _ = work(start, stop, None, count)
        return indices[:count], values[:count], not nonfinite.value

    if numel < 2 * threads.GRAIN:
        return work(0, numel)
    parts = run_on_elements(work, numel)
    indices, values, finite = zip(*parts, strict=True)
    return torch.cat(indices), torch.cat(values), all(finite)
