"""Selection by magnitude in C: same results as `lowbit_strategy.kernels.reference.select`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lowbit_strategy.kernels.native import function, isa
from lowbit_strategy.kernels.native.threads import run, run_on_elements
from lowbit_strategy.kernels.reference.rng import hash32

_CHUNK = 4096


def sample_magnitudes(x: Tensor, num: int, seed: int, addend: Tensor | None) -> Tensor:
    magnitudes = torch.empty(num, dtype=torch.float32)
    function("lowbit_sample_magnitudes")(x, addend, x.numel(), num, hash32(seed), magnitudes)
    return magnitudes


def chunk_top_k(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    kept_M, room = kept_M.contiguous(), positions_MK.shape[1]

    def work(first: int, last: int) -> None:
        function("lowbit_chunk_top_k")(isa().encode(), x, first, last, kept_M, room, positions_MK, values_MK)

    run(work, kept_M.numel(), _CHUNK)


def top_k_(x: Tensor, addend: Tensor | None, k: int, groups: int) -> tuple[tuple[Tensor, Tensor] | None, bool]:
    """What is found, or None where another way must be taken, and whether all numbers are finite; `x` has the sums."""
    capacity = 8 * k + 1024
    scratch = torch.empty(groups + 3 * capacity, dtype=torch.int32)
    positions, values = torch.empty(k, dtype=torch.int64), torch.empty(k, dtype=torch.float32)
    count = function("lowbit_top_k")(
        isa().encode(), x, addend, x.numel(), k, groups, scratch, capacity, positions, values
    )
    return (positions, values) if count == k else None, count != -2


def select_above(
    x: Tensor, threshold: float, expected: int | None, addend: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """Positions and values, of the sums if there is an addend, and whether all sums are finite; `x` has them."""
    numel = x.numel()
    share = (numel // 64 if expected is None else expected + expected // 2) / max(numel, 1)

    def work(start: int, stop: int) -> tuple[Tensor, Tensor, bool]:
        capacity = min(stop - start, int(share * (stop - start)) + 1024)
        count, indices, values, finite = _select(x, start, stop, threshold, capacity, addend)
        if count > capacity:
            count, indices, values, _ = _select(x, start, stop, threshold, count, None)
        return indices[:count], values[:count], finite

    parts = run_on_elements(work, numel)
    if len(parts) == 1:
        return parts[0]
    indices, values, finite = zip(*parts, strict=True)
    return torch.cat(indices), torch.cat(values), all(finite)


def _select(
    x: Tensor, start: int, stop: int, threshold: float, capacity: int, addend: Tensor | None
) -> tuple[int, Tensor, Tensor, bool]:
    indices, values = torch.empty(capacity, dtype=torch.int32), torch.empty(capacity, dtype=torch.float32)
    arguments = (start, stop, threshold, indices, values, capacity)
    if addend is None:
        return int(function("lowbit_select")(isa().encode(), x, *arguments)), indices, values, True
    nonfinite = ctypes.c_int32()
    count = function("lowbit_add_select")(isa().encode(), x, addend, *arguments, ctypes.byref(nonfinite))
    return int(count), indices, values, not nonfinite.value
