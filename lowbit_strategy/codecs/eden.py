"""Rotated blocks as values of a Gaussian codebook, with the one scale that keeps the block's own direction exactly."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowbit_strategy.codecs.blockwise import BlockwiseCodec, Noise, trailer
from lowbit_strategy.codecs.onebit import pack_bits, unpack_bits
from lowbit_strategy.codecs.packed import pack_segments
from lowbit_strategy.kernels.codebooks import gaussian_codebook
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.rotation import rotate
from lowbit_strategy.kernels.segments import Segments

_SCALE_NBYTES = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class EdenCodec(BlockwiseCodec):
    """EDEN's quantiser, at one bit DRIVE's. For a block x of n elements:

    1. ``y = H D x / sqrt(n)``, H the Hadamard matrix, D fixed random signs
    2. ``c_i``: the nearest of the 2**bits values fitted to a Gaussian, of ``sqrt(n) y_i / |y|``
    3. the scale ``S = |x|^2 / <y, c>``; the block decodes to ``S`` times c, rotated back

    So what is decoded has the same product with x as x itself, for every x; of a codebook of unit gain that
    holds on Gaussian blocks only. The sum of what all ranks send is rotated back once.

    Args:
        bits: Of a code, 1 to 4. At one bit c is the sign, and ``S = |x|^2 / |y|_1``.
        block_size: Elements that are rotated together and share a scale, a power of two.
        least_error: ``S = <y, c> / |c|^2`` instead: the block shrinks, and the error is never larger than it.
    """

    bits: int = 1
    block_size: int = 128
    least_error: bool = False

    @property
    def label(self) -> str:
        return f"{self.bits}-bit eden, block {self.block_size}"

    def nearest(self) -> EdenCodec:
        return replace(self, least_error=True)

    @property
    def block_nbytes(self) -> int:
        return self.block_size * self.bits // 8 + _SCALE_NBYTES

    def encode_blocks(self, h_KB: Tensor, valid_KB: Tensor, finite_K: Tensor, noise: Noise) -> Tensor:
        largest_K = h_KB.abs().amax(-1)  # squares of what remains neither overflow nor vanish
        unit_KB = h_KB / torch.where(largest_K > 0, largest_K, 1.0)[:, None]
        y_KB = rotate(unit_KB)
        square_K = tree_sum(y_KB * y_KB)
        rms_K = (square_K / self.block_size).sqrt()
        codebook = _codebook(self.bits, h_KB.device)
        code_KB = torch.bucketize(
            y_KB / torch.where(rms_K > 0, rms_K, 1.0)[:, None], codebook.diff() / 2 + codebook[:-1]
        )
        c_KB = codebook[code_KB]
        product_K = tree_sum(y_KB * c_KB)
        scale_K = product_K / tree_sum(c_KB * c_KB) if self.least_error else square_K / product_K
        scale_K = torch.where(largest_K > 0, scale_K * largest_K, 0.0)
        scale_K = torch.where(finite_K, scale_K, torch.nan).to(torch.bfloat16)
        planes = [pack_bits(code_KB >> bit & 1) for bit in range(self.bits)]
        return torch.cat([*planes, scale_K[:, None].view(torch.uint8)], 1)

    def decode_blocks(self, payload_KC: Tensor) -> Tensor:
        return rotate(self._rotated(payload_KC), inverse=True)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        packed = pack_segments(segments, self.block_size)
        total = torch.zeros(packed.num_blocks, self.block_size, dtype=torch.float32, device=out.device)
        for wire in wire_WB:
            total += self._rotated(packed.collect_wire(wire, self.block_nbytes))
        packed.spread_(rotate(total, inverse=True).mul_(alpha).view(-1), out)

    def _rotated(self, payload_KC: Tensor) -> Tensor:
        scale_K1 = trailer(payload_KC, _SCALE_NBYTES, torch.bfloat16).float()
        planes = payload_KC[:, :-_SCALE_NBYTES].split(self.block_size // 8, dim=1)
        code_KB = sum(unpack_bits(plane).long() << bit for bit, plane in enumerate(planes))
        assert isinstance(code_KB, Tensor)
        return _codebook(self.bits, payload_KC.device)[code_KB] * scale_K1


@functools.cache
def _codebook(bits: int, device: torch.device) -> Tensor:
    return torch.tensor(gaussian_codebook(2**bits), dtype=torch.float32, device=device)
