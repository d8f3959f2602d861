"""Packing small integers as tightly as whole bytes allow: for sums of codes, whose range grows with the ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def digits_per_byte(limit: int) -> int:
    """How many numbers in ``[-limit, limit]`` one byte holds as digits of a number system: 5 for trits."""
    base, count = 2 * limit + 1, 0
    while base ** (count + 1) <= 256:
        count += 1
    return count


def bit_widths(limit: int) -> tuple[int, ...]:
    """Widths of the bit planes that hold ``0 ... 2 * limit``, low bits first; each fits into a byte."""
    left, widths = (2 * limit).bit_length(), []
    while left:
        width = next(width for width in (8, 4, 2, 1) if left >= width)
        widths.append(width)
        left -= width
    return tuple(widths)


def uses_digits(limit: int) -> bool:
    """Whether digits are shorter than bits: 3, 5 (and few other numbers of) values."""
    digits = digits_per_byte(limit)
    return digits > 0 and digits * sum(bit_widths(limit)) > 8


def packed_nbytes(numel: int, limit: int) -> int:
    if uses_digits(limit):
        return -(-numel // digits_per_byte(limit))
    return -(-numel // 8) * sum(bit_widths(limit))


def pack_integers(q_RN: Tensor, limit: int) -> Tensor:
    """uint8 [R, packed_nbytes(N)] of int32 rows in ``[-limit, limit]``.

    Byte j holds elements j, j + n, j + 2n ... of its row, the first in the lowest digit or bits.
    """
    codes_RN = q_RN + limit
    if uses_digits(limit):
        count, base = digits_per_byte(limit), 2 * limit + 1
        parts = _split(codes_RN, count)
        return _joined(parts, [base**k for k in range(count)])
    padded_RN = torch.nn.functional.pad(codes_RN, (0, -codes_RN.shape[1] % 8))
    planes, shift = [], 0
    for width in bit_widths(limit):
        parts = _split((padded_RN >> shift) & ((1 << width) - 1), 8 // width)
        planes.append(_joined(parts, [1 << (k * width) for k in range(8 // width)]))
        shift += width
    return torch.cat(planes, 1)


def unpack_integers(packed_RB: Tensor, numel: int, limit: int) -> Tensor:
    """int32 [R, numel]: the inverse of `pack_integers`."""
    wide_RB = packed_RB.int()
    if uses_digits(limit):
        base = 2 * limit + 1
        parts = [(wide_RB // base**k) % base for k in range(digits_per_byte(limit))]
        return torch.cat(parts, 1)[:, :numel] - limit
    padded = -(-numel // 8) * 8
    codes_RN = torch.zeros(packed_RB.shape[0], padded, dtype=torch.int32, device=packed_RB.device)
    shift, start = 0, 0
    for width in bit_widths(limit):
        size = padded * width // 8
        plane = wide_RB[:, start : start + size]
        fields = [(plane >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)]
        codes_RN |= torch.cat(fields, 1) << shift
        shift, start = shift + width, start + size
    return codes_RN[:, :numel] - limit


def _split(codes_RN: Tensor, count: int) -> Tensor:
    padded = torch.nn.functional.pad(codes_RN, (0, -codes_RN.shape[1] % count))
    return padded.view(padded.shape[0], count, -1)


def _joined(parts_RKN: Tensor, weights: list[int]) -> Tensor:
    """uint8 [R, n]: one byte of every element of the K parts."""
    byte_RN = parts_RKN[:, 0].clone()
    for k, weight in enumerate(weights[1:], start=1):
        byte_RN += parts_RKN[:, k] * weight
    return byte_RN.to(torch.uint8)
