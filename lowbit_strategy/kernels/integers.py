"""Packs small integers into bytes, as bit planes or as digits of a number system.

Packing is half-split: byte j holds elements j, j + n, j + 2n ... of its row, the first in the lowest digit or bits.
This vectorizes; neighboring elements in one byte do not.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Digits(NamedTuple):
    """Codes as digits of a number system.

    Args:
        per_byte: Codes in each byte.
        base: Greater than any code; ``base ** per_byte`` is at most 256.
    """

    per_byte: int
    base: int

    def pack(self, codes_RN: Tensor) -> Tensor:
        """uint8 [R, N / per_byte]."""
        parts_RKN = codes_RN.view(codes_RN.shape[0], self.per_byte, -1)
        byte_RN = parts_RKN[:, 0].clone()
        for k in range(1, self.per_byte):
            byte_RN += parts_RKN[:, k] * self.base**k
        return byte_RN.to(torch.uint8)

    def unpack(self, packed_RB: Tensor) -> Tensor:
        """The inverse of `pack`, in the dtype of `packed_RB`."""
        return torch.cat([(packed_RB // self.base**k) % self.base for k in range(self.per_byte)], 1)


class Planes(NamedTuple):
    """Codes cut into planes of bits, low bits first.

    Args:
        widths: Bits of a code in each plane: 1, 2, 4 or 8.
    """

    widths: tuple[int, ...]

    def pack(self, codes_RN: Tensor) -> Tensor:
        """uint8 [R, N / 8 * bits]. N is a multiple of 8."""
        planes = []
        for width in self.widths[:-1]:
            planes.append(Digits(8 // width, 1 << width).pack(codes_RN & ((1 << width) - 1)))
            codes_RN = codes_RN >> width
        top = self.widths[-1]
        return torch.cat([*planes, Digits(8 // top, 1 << top).pack(codes_RN)], 1)

    def unpack(self, packed_RB: Tensor) -> Tensor:
        """The inverse of `pack`, in the dtype of `packed_RB`."""
        bytes_of_bit = packed_RB.shape[1] // sum(self.widths)
        planes = packed_RB.split([width * bytes_of_bit for width in self.widths], 1)
        fields = [
            torch.cat([(plane_RB >> (k * width)) & ((1 << width) - 1) for k in range(8 // width)], 1)
            for width, plane_RB in zip(self.widths, planes, strict=True)
        ]
        codes_RN = fields.pop()
        for width, field_RN in zip(reversed(self.widths[:-1]), reversed(fields), strict=True):
            codes_RN = (codes_RN << width) | field_RN
        return codes_RN


BITS = Planes((1,))
