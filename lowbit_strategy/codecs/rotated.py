"""A codec of rotated values: no element of a block stands out, so that coarse codes lose less."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, Codec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.rotation import rotate
from lowbit_strategy.kernels.segments import Segments

Transform = Literal["hadamard", "cosine"]


DENSE_BLOCK = 128  # rotated together where the codec itself has no blocks


@dataclass(frozen=True, slots=True)
class RotatedCodec(BucketCodec):
    """``codec`` on ``H D x / sqrt(n)``, block by block; the sum of what all ranks send is rotated back once.

    ``H`` is the Hadamard matrix of n = `size` elements, ``D`` fixed random signs, so that a constant block is spread
    as well. The rotation keeps lengths: the error is the inner codec's error of a block that looks Gaussian.

    Args:
        codec: Encodes the rotated blocks.
        size: Elements rotated together, a power of two that divides the codec's block size; None takes the block size.
        transform: ``cosine`` is the discrete cosine transform instead of ``H D``: smooth rows become few large
            coefficients, which is what selection wants and the opposite of what a grid does.

    Raises:
        ValueError: `size` does not fit.
    """

    codec: Codec
    size: int | None = None
    transform: Transform = "hadamard"

    def __post_init__(self) -> None:
        size, block_size = self.rotation_size, self.block_size
        if not isinstance(size, int) or size < 2 or size & (size - 1) or block_size % size:
            raise ValueError(f"size must be a power of two that divides the block size {block_size}, got {size!r}")

    @property
    def block_size(self) -> int:
        return self.codec.block_size if self.codec.block_size > 1 else DENSE_BLOCK

    @property
    def rotation_size(self) -> int:
        return self.block_size if self.size is None else self.size

    @property
    def label(self) -> str:
        how = "rotated by" if self.transform == "hadamard" else "cosines of"
        return f"{self.codec.label}, {how} {self.rotation_size}"

    def nearest(self) -> RotatedCodec:
        return replace(self, codec=self.codec.nearest())

    @property
    def contracts(self) -> bool:
        return self.codec.contracts  # a rotation keeps lengths

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(-(-numel // self.rotation_size) * self.rotation_size)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.rotation_size)
        rotated = self._transformed(packed.collect(x))
        self.codec.encode_(rotated, wire, packed.padded_segments, {}, step, flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        packed = pack_segments(segments, self.rotation_size)
        rotated = torch.empty(packed.numel, dtype=torch.float32, device=out.device)
        self.codec.decode_sum_(wire_WB, rotated, packed.padded_segments, {}, alpha)
        packed.spread_(self._transformed(rotated, inverse=True), out)

    def _transformed(self, x_N: Tensor, *, inverse: bool = False) -> Tensor:
        transform = cosines if self.transform == "cosine" else rotate
        return transform(x_N.view(-1, self.rotation_size), inverse=inverse).view(-1)


def cosines(x_KN: Tensor, *, inverse: bool) -> Tensor:
    """Orthonormal discrete cosine transform (type II) of the rows, or its inverse. Added up in order: the same bits for
    any K.
    """
    matrix = _cosine_matrix(x_KN.shape[1], x_KN.device)
    rows = matrix if inverse else matrix.T
    y = torch.zeros_like(x_KN)
    for n in range(x_KN.shape[1]):
        y.addcmul_(x_KN[:, n, None], rows[n])
    return y


@functools.cache
def _cosine_matrix(size: int, device: torch.device) -> Tensor:
    """float32 [frequency, place], the same numbers on every device."""
    place, frequency = torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64)[:, None]
    matrix = (math.pi / size * (place + 0.5) * frequency).cos() * (2 / size) ** 0.5
    matrix[0] *= 0.5**0.5
    return matrix.float().to(device)
