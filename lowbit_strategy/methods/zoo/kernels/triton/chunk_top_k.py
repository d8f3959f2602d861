"""The largest elements of each chunk, one program per chunk: one read of the gradient, no sorting, no host."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.triton.bits import MAGNITUDE
from lowbit_strategy.kernels.triton.programs import on

NUM_WARPS = 8  # 16 elements per thread: the chunk stays in registers


@triton.jit
def chunk_top_k_kernel(x, kept, positions, values, room, CHUNK: tl.constexpr):
    """Find the kept-th largest magnitude, bit by bit from the top: integers order like the floats, with NaN last."""
    chunk = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNK)
    value = tl.load(x + chunk * CHUNK + at)
    key = value.to(tl.int32, bitcast=True) & MAGNITUDE
    wanted = tl.load(kept + chunk)
    smallest = wanted * 0
    for step in range(31):
        trial = smallest | (1 << (30 - step))
        smallest = tl.where(tl.sum((key >= trial).to(tl.int32), axis=0) >= wanted, trial, smallest)
    is_above = key > smallest
    is_tie = key == smallest
    ties = wanted - tl.sum(is_above.to(tl.int32), axis=0)
    chosen = is_above | (is_tie & (tl.cumsum(is_tie.to(tl.int32), axis=0) <= ties))
    slot = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(positions + chunk * room + slot, at.to(tl.int16), mask=chosen)
    tl.store(values + chunk * room + slot, value, mask=chosen)


def chunk_top_k(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    with on(x.device):
        chunk_top_k_kernel[(kept_M.numel(),)](
            x,
            kept_M,
            positions_MK,
            values_MK,
            positions_MK.shape[1],
            CHUNK=x.numel() // kept_M.numel(),
            num_warps=NUM_WARPS,
        )
