"""Kernels that work on rows and chunks, against the reference: rotation, and the largest of each chunk."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.methods.zoo.kernels.chunk_top_k import reference
from lowbit_strategy.methods.zoo.kernels.rotation import rotate_rows, signs

ROTATIONS = ((1, 2), (5, 32), (300, 32), (33, 128), (3, 512), (1, 512))
LARGE_ROTATIONS = ((131_077, 32), (4097, 512))  # many programs, and a rest


def check_rotations(fast: Any, device: str, sizes: tuple[tuple[int, int], ...] = ROTATIONS) -> list[str]:
    """Rows that fill programs and a rest, of ordinary, tiny and huge numbers; what differs, in words."""
    wrong, generator = [], torch.Generator().manual_seed(0)
    for num_rows, size in sizes:
        x = torch.randn(num_rows, size, generator=generator)
        x *= 10.0 ** torch.randint(-30, 30, (num_rows, 1), generator=generator)
        for inverse in (False, True):
            wanted = rotate_rows(x, signs(size, x.device), inverse=inverse)
            on_device = x.to(device)
            found = fast.rotate(on_device, signs(size, on_device.device), inverse=inverse).cpu()
            if not torch.equal(found.view(torch.int32), wanted.view(torch.int32)):
                wrong.append(f"{num_rows} rows of {size}, inverse {inverse}: {int((found != wanted).sum())} differ")
    return wrong


def chunk_cases() -> list[tuple[str, Tensor, Tensor, int]]:
    """Name, elements, how many of each chunk are kept, room: ties, zeros, numbers below the normal range, inf, NaN."""
    x = torch.randn(7 * 4096, generator=torch.Generator().manual_seed(0))
    x[5000], x[5001], x[6000] = math.nan, math.inf, -math.nan
    x[2 * 4096 : 3 * 4096] = 0.0
    x[3 * 4096 : 4 * 4096].round_()
    x[4 * 4096 : 5 * 4096] *= 1e-42
    cases = []
    for kept in (1, 4, 41, 1000, 4096):
        kept_M = torch.tensor([kept, kept, kept, kept, kept, 0, max(1, kept // 2)], dtype=torch.int32)
        cases.append((f"{kept} of each", x, kept_M, kept))
    return cases


def check_chunks(fast: Any, device: str) -> list[str]:
    """Positions and values of the largest of each chunk; what differs, in words."""
    wrong = []
    for name, x, kept_M, room in chunk_cases():
        results = []
        for choose_, where in ((reference, "cpu"), (fast.chunk_top_k, device)):
            positions = torch.zeros(kept_M.numel(), room, dtype=torch.int16, device=where)
            values = torch.zeros(kept_M.numel(), room, dtype=torch.float32, device=where)
            choose_(x.to(where), kept_M.to(where), positions, values)
            results.append({"positions": positions.cpu(), "values": values.cpu().view(torch.int32)})
        wanted, found = results
        wrong += [f"{name}: {what} differ" for what in wanted if not torch.equal(wanted[what], found[what])]
    return wrong
