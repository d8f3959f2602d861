"""Packs integers of any range, such as sums of codes over ranks, into few bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import bit_planes
from lowbit_strategy.kernels.integers import Digits, Planes


def packing_of(limit: int) -> Digits | Planes:
    """The shortest packing of numbers in ``[-limit, limit]``: digits for 3, 5 (and few other numbers of) values."""
    base, bits, per_byte = 2 * limit + 1, (2 * limit).bit_length(), 0
    while base ** (per_byte + 1) <= 256:
        per_byte += 1
    return Digits(per_byte, base) if per_byte * bits > 8 else Planes(bit_planes(bits))


def packed_nbytes(numel: int, limit: int) -> int:
    packing = packing_of(limit)
    if isinstance(packing, Digits):
        return -(-numel // packing.per_byte)
    return -(-numel // 8) * sum(packing.widths)


def pack_integers(q_RN: Tensor, limit: int) -> Tensor:
    """uint8 [R, packed_nbytes(N)] of int32 rows in ``[-limit, limit]``, such as sums of codes over ranks."""
    packing = packing_of(limit)
    multiple = packing.per_byte if isinstance(packing, Digits) else 8
    return packing.pack(torch.nn.functional.pad(q_RN + limit, (0, -q_RN.shape[1] % multiple)))


def unpack_integers(packed_RB: Tensor, numel: int, limit: int) -> Tensor:
    """int32 [R, numel]: the inverse of `pack_integers`."""
    return packing_of(limit).unpack(packed_RB.int())[:, :numel] - limit
