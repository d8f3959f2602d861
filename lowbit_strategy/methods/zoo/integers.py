"""Packs integers of any range, such as sums of codes over ranks, into few bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import bit_planes
from lowbit_strategy.kernels.integers import pack_digits, pack_planes, unpack_digits, unpack_planes


def digits_per_byte(limit: int) -> int:
    """The count of numbers in ``[-limit, limit]`` that one byte holds as digits of a number system: 5 for trits."""
    base, count = 2 * limit + 1, 0
    while base ** (count + 1) <= 256:
        count += 1
    return count


def uses_digits(limit: int) -> bool:
    """Whether digits are shorter than bits: 3, 5 (and few other numbers of) values."""
    digits = digits_per_byte(limit)
    return digits > 0 and digits * (2 * limit).bit_length() > 8


def packed_nbytes(numel: int, limit: int) -> int:
    if uses_digits(limit):
        return -(-numel // digits_per_byte(limit))
    return -(-numel // 8) * (2 * limit).bit_length()


def pack_integers(q_RN: Tensor, limit: int) -> Tensor:
    """uint8 [R, packed_nbytes(N)] of int32 rows in ``[-limit, limit]``, such as sums of codes over ranks."""
    multiple = digits_per_byte(limit) if uses_digits(limit) else 8
    padded_RN = torch.nn.functional.pad(q_RN + limit, (0, -q_RN.shape[1] % multiple))
    if uses_digits(limit):
        return pack_digits(padded_RN, multiple, 2 * limit + 1)
    return pack_planes(padded_RN, bit_planes((2 * limit).bit_length()))


def unpack_integers(packed_RB: Tensor, numel: int, limit: int) -> Tensor:
    """int32 [R, numel]: the inverse of `pack_integers`."""
    if uses_digits(limit):
        codes_RN = unpack_digits(packed_RB.int(), digits_per_byte(limit), 2 * limit + 1)
    else:
        codes_RN = unpack_planes(packed_RB.int(), bit_planes((2 * limit).bit_length()))
    return codes_RN[:, :numel] - limit
