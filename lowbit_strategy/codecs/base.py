"""A codec turns floats into a fixed number of bytes and back; it knows no ranks and keeps no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.contraction import contracts, keeps_zeros
from lowbit_strategy.kernels.segments import Segment, Segments


class Codec(ABC):
    """float[n] <-> uint8[wire_nbytes(n)].

    A codec is a frozen dataclass. It implements `encode` and `decode_sum` for one tensor; the versions that work on
    the segments of a bucket have defaults that loop over them. What codes a whole bucket at once is a `BucketCodec`.
    """

    in_one_pass: ClassVar[bool] = False  # a kernel's, without temporary memory per element; else parts take turns

    @property
    def block_size(self) -> int:
        """Elements that are coded together: chunks start on multiples of it."""
        return 1

    @property
    def label(self) -> str:
        """A few words for reports."""
        return type(self).__name__.removesuffix("Codec").lower()

    def nearest(self) -> Codec:
        """The code with the least error instead of no bias: what error feedback needs, since the error of an unbiased
        code with few values is larger than its input. Itself where there is no such choice.
        """
        return self

    @property
    def contracts(self) -> bool:
        """Whether ``|x - C(x)| < |x|``, as error feedback and EF21 need; found out with some hard blocks."""
        size = max(self.block_size, 64)
        return contracts(lambda x: self.decode_sum(self.encode(x, seed=0)[None], size), size)

    @property
    def keeps_zeros(self) -> bool:
        """Whether a zero beside other values is decoded as zero; found out with a block that has both kinds. A block of
        nothing but zeros is decoded as zeros by every codec.
        """
        size = max(self.block_size, 64)
        return keeps_zeros(lambda x: self.decode_sum(self.encode(x, seed=0)[None], size), size)

    @abstractmethod
    def wire_nbytes(self, numel: int) -> int:
        """Bytes of `numel` elements: exact, and independent of their values."""

    @abstractmethod
    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        """uint8 [wire_nbytes(N)] for float32, bfloat16 or float16 [N]. `seed`: 32 bits for stochastic codecs."""

    @abstractmethod
    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        """float32 [numel]: the sum of the W decoded rows, added in float32 in row order."""

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        """Encode each segment of `x` at its place in `wire`; set `flag` to 1 on inf or NaN."""
        for row in segments.rows:
            piece = x[row.x_offset : row.x_offset + row.numel]
            encoded = self.encode(piece, seed=seed ^ row.salt)
            wire[row.wire_offset : row.wire_offset + encoded.numel()] = encoded
            flag |= (~piece.isfinite().all()).to(flag.dtype)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        """``out[segment] = alpha * decode_sum(rows' bytes of the segment)``."""
        for row in segments.rows:
            rows = wire_WB[:, row.wire_offset : row.wire_offset + self.wire_nbytes(row.numel)]
            total = self.decode_sum(rows.contiguous(), row.numel)
            out[row.x_offset : row.x_offset + row.numel] = total.mul_(alpha)


class BucketCodec(Codec):
    """A codec that codes all segments of a bucket at once; one tensor is to it a bucket of one segment.

    It implements `encode_segments_` and `decode_sum_segments_`.
    """

    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        wire = torch.zeros(self.wire_nbytes(x_N.numel()), dtype=torch.uint8, device=x_N.device)
        flag = torch.zeros(1, dtype=torch.int32, device=x_N.device)
        self.encode_segments_(x_N.contiguous(), wire, Segments([Segment(0, x_N.numel(), 0, 0)]), seed=seed, flag=flag)
        return wire

    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        out = torch.empty(numel, dtype=torch.float32, device=wire_WB.device)
        self.decode_sum_segments_(wire_WB, out, Segments([Segment(0, numel, 0, 0)]), alpha=1.0)
        return out
