"""Hadamard rotation of short rows: one read and one write of memory, butterflies in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbit_strategy.kernels.triton.layout import Launch
from lowbit_strategy.kernels.triton.programs import on

LAUNCH = Launch(elements_per_thread=16, num_warps=1, vector=4)  # no value leaves its warp: no barriers


@triton.jit
def butterflies(y, HALF: tl.constexpr):
    """Sums and differences of neighbors that are HALF apart."""
    ROWS: tl.constexpr = y.shape[0]
    SIZE: tl.constexpr = y.shape[1]
    pairs = tl.permute(tl.reshape(y, [ROWS, SIZE // (2 * HALF), 2, HALF]), [0, 1, 3, 2])
    upper, lower = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(upper + lower, upper - lower), [0, 1, 3, 2]), [ROWS, SIZE])


@triton.jit
def rotate_kernel(
    x, out, signs, num_rows, scale, SIZE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, INVERSE: tl.constexpr
):
    """The order of sums is the reference's: neighbors first, then twice as far apart each time."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SIZE)
    at = row[:, None] * SIZE + column[None, :]
    present = (row < num_rows)[:, None]
    sign = tl.load(signs + column)[None, :]
    y = tl.load(x + at, mask=present, other=0.0)
    if not INVERSE:
        y = y * sign
    for i in tl.static_range(STAGES):
        y = butterflies(y, 1 << i)
    y = y * scale
    if INVERSE:
        y = y * sign
    tl.store(out + at, y, mask=present)


def rotate(x_KN: Tensor, signs_N: Tensor, *, inverse: bool) -> Tensor:
    (num_rows, size), out = x_KN.shape, torch.empty_like(x_KN)
    rows = LAUNCH.tile(size) // size
    with on(x_KN.device):
        rotate_kernel[(triton.cdiv(num_rows, rows),)](
            x_KN,
            out,
            signs_N,
            num_rows,
            size**-0.5,
            SIZE=size,
            STAGES=size.bit_length() - 1,
            ROWS=rows,
            INVERSE=inverse,
            num_warps=LAUNCH.num_warps,
            enable_fp_fusion=False,
        )
    return out
