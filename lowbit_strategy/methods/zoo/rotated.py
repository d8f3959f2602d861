"""A codec of rotated values, of which none stands out in its block, so that coarse codes lose less."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import BucketCodec, Codec, StateTensors, StepContext
from lowbit_strategy.codecs.packed import Packed, pack_segments
from lowbit_strategy.kernels.segments import Segments
from lowbit_strategy.methods.zoo.kernels.rotation import rotate

DENSE_BLOCK = 128  # rotated together where the codec itself has no blocks


@dataclass(frozen=True, slots=True)
class RotatedCodec(BucketCodec):
    """``codec`` on ``H D x / sqrt(n)``, block by block; the sum of what all ranks send is rotated back once.

    ``H`` is the Hadamard matrix of n = `size` elements, ``D`` fixed random signs, so that a constant block is spread
    as well. The rotation keeps lengths: the error is the inner codec's error of a block that looks Gaussian.

    Args:
        codec: Encodes the rotated blocks.
        size: Elements rotated together, a power of two that divides the codec's block size; None takes the block size.

    Raises:
        ValueError: `size` does not fit.
    """

    codec: Codec
    size: int | None = None

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
        return f"{self.codec.label}, rotated by {self.rotation_size}"

    def wire_nbytes(self, numel: int) -> int:
        return self.codec.wire_nbytes(-(-numel // self.rotation_size) * self.rotation_size)

    def transformed(self, x_KN: Tensor, *, inverse: bool = False) -> Tensor:
        """The rotation of each row, or its inverse."""
        return rotate(x_KN, inverse=inverse)

    def encode_(
        self, x: Tensor, wire: Tensor, segments: Segments, state: StateTensors, step: StepContext, flag: Tensor
    ) -> None:
        packed = pack_segments(segments, self.rotation_size)
        rotated_KN = self.transformed(packed.collect(x).view(-1, self.rotation_size))
        self.codec.encode_(rotated_KN.view(-1), wire, _padded(packed), {}, step, flag)

    def decode_sum_(self, wire_WB: Tensor, out: Tensor, segments: Segments, state: StateTensors, alpha: float) -> None:
        packed = pack_segments(segments, self.rotation_size)
        rotated = torch.empty(packed.numel, dtype=torch.float32, device=out.device)
        self.codec.decode_sum_(wire_WB, rotated, _padded(packed), {}, alpha)
        packed.spread_(self.transformed(rotated.view(-1, self.rotation_size), inverse=True).view(-1), out)


def _padded(packed: Packed) -> Segments:
    """The packed segments with their padding."""
    rows = zip(packed.segments.rows, packed.lengths, strict=True)
    return packed.segments.kept("padded", lambda: Segments([row._replace(numel=length) for row, length in rows]))
