"""Packs small integers into bytes, as bit planes or as digits of a number system.

Packing is half-split: byte j holds elements j, j + n, j + 2n ... of its row, the first in the lowest digit or bits.
This vectorizes; neighboring elements in one byte do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_digits(codes_RN: Tensor, count: int, base: int) -> Tensor:
    """Pack `count` codes below `base` into each byte: uint8 [R, N / count]."""
    parts_RKN = codes_RN.view(codes_RN.shape[0], count, -1)
    byte_RN = parts_RKN[:, 0].clone()
    for k in range(1, count):
        byte_RN += parts_RKN[:, k] * base**k
    return byte_RN.to(torch.uint8)


def unpack_digits(packed_RB: Tensor, count: int, base: int) -> Tensor:
    """The inverse of `pack_digits`, in the dtype of `packed_RB`."""
    return torch.cat([(packed_RB // base**k) % base for k in range(count)], 1)


def pack_planes(codes_RN: Tensor, widths: Sequence[int]) -> Tensor:
    """Cut codes into planes of these widths, low bits first: uint8 [R, N / 8 * bits]. N is a multiple of 8."""
    planes, shift = [], 0
    for width in widths:
        planes.append(pack_digits((codes_RN >> shift) & ((1 << width) - 1), 8 // width, 1 << width))
        shift += width
    return torch.cat(planes, 1)


def unpack_planes(packed_RB: Tensor, widths: Sequence[int]) -> Tensor:
    """The inverse of `pack_planes`, in the dtype of `packed_RB`."""
    bytes_of_bit = packed_RB.shape[1] // sum(widths)
    codes_RN, shift = packed_RB.new_zeros(packed_RB.shape[0], 8 * bytes_of_bit), 0
    for width, plane_RB in zip(widths, packed_RB.split([width * bytes_of_bit for width in widths], 1), strict=True):
        fields = [(plane_RB >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)]
        codes_RN |= torch.cat(fields, 1) << shift
        shift += width
    return codes_RN


def pack_bits(bits_KB: Tensor) -> Tensor:
    """Pack bits as uint8 [K, B / 8]: byte j holds elements j, j + B/8, j + 2B/8 ..."""
    return pack_digits(bits_KB.to(torch.uint8), 8, 2)


def unpack_bits(packed_KC: Tensor) -> Tensor:
    """The inverse of `pack_bits`: Boolean [K, 8 C]."""
    return torch.cat([(packed_KC >> k) & 1 for k in range(8)], 1).bool()
