"""Codes of an error bound in the place of bits: every block takes as many bits as its own values need."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.kernels.integers import pack_bits, unpack_bits

_BLOCK = 128
_PLANE_NBYTES = _BLOCK // 8  # one bit of every element
_RAW = 255  # the width of a block that travels as float32
_RAW_NBYTES = 4 * _BLOCK
_LARGEST = 2**23  # above, neighboring float32 are further apart than the bound allows


@dataclass(frozen=True, slots=True)
class Bounded:
    """No element is further from what is decoded than `bound`, before that is rounded to its type.

    The rounding adds at most half a unit in the last place: of the magnitude ``2**-24`` in float32, ``2**-11`` in
    float16, ``2**-8`` in bfloat16. A bound below that is kept by float32 alone.

    1. ``q = round(x / (2 * bound))``
    2. every block of 128 elements has the width that its largest ``|q|`` needs, from 0 bits on, and a byte that says so
    3. a block whose values are not finite, or too large for the bound, travels as float32

    How many bytes that takes depends on the values.

    Args:
        bound: Largest error, in units of the tensor. Of a sum or a mean over ranks: of the result.

    Raises:
        ValueError: `bound` is not positive.

    References:
        Di, Cappello, "Fast Error-Bounded Lossy HPC Data Compression with SZ", 2016, the bound; Feng et al.,
        "Accelerating Communication in Deep Learning Recommendation Model Training with Dual-Level Adaptive Lossy
        Compression", 2024, arXiv 2407.04272, for embeddings.
    """

    bound: float

    def __post_init__(self) -> None:
        if not (self.bound > 0 and math.isfinite(self.bound)):
            raise ValueError(f"bound must be a positive number, the largest error allowed, got {self.bound!r}")

    def encode(self, x_N: Tensor) -> Tensor:
        """uint8, as long as need be: a width per block, then the blocks' bits, those of equal width together."""
        x_KB = torch.nn.functional.pad(x_N.detach().float().reshape(-1), (0, -x_N.numel() % _BLOCK)).view(-1, _BLOCK)
        q_KB = (x_KB.double() / (2 * self.bound)).round()
        raw_K = ~(q_KB.abs() <= _LARGEST).all(1)
        q_KB = torch.where(raw_K[:, None], 0.0, q_KB).long()
        u_KB = torch.where(q_KB < 0, -2 * q_KB - 1, 2 * q_KB)  # small numbers for small magnitudes
        width_K = torch.frexp(u_KB.amax(1).double())[1].to(torch.uint8)
        width_K[raw_K] = _RAW
        parts = [width_K]
        for width in width_K.unique().tolist():
            chosen = width_K == width
            if width == _RAW:
                parts.append(x_KB[chosen].contiguous().view(torch.uint8).reshape(-1))
            elif width:
                planes = [pack_bits(u_KB[chosen] >> bit & 1) for bit in range(width)]
                parts.append(torch.cat(planes, 1).reshape(-1))
        return torch.cat(parts)

    def decode(self, wire_B: Tensor, numel: int) -> Tensor:
        """float32 ``[numel]``."""
        num_blocks = -(-numel // _BLOCK)
        width_K, at = wire_B[:num_blocks], num_blocks
        out_KB = torch.zeros(num_blocks, _BLOCK, dtype=torch.float32, device=wire_B.device)
        for width in width_K.unique().tolist():
            chosen = width_K == width
            nbytes = _RAW_NBYTES if width == _RAW else width * _PLANE_NBYTES
            end = at + nbytes * int(chosen.sum())
            payload_KC = wire_B[at:end].view(-1, nbytes) if nbytes else wire_B[:0]
            at = end
            if width == _RAW:
                out_KB[chosen] = payload_KC.clone().view(torch.float32)
            elif width:
                planes = payload_KC.split(_PLANE_NBYTES, dim=1)
                u_KB = torch.stack([unpack_bits(plane).long() << bit for bit, plane in enumerate(planes)]).sum(0)
                q_KB = torch.where(u_KB % 2 == 1, -(u_KB + 1) // 2, u_KB // 2)
                out_KB[chosen] = (q_KB.double() * (2 * self.bound)).float()
        return out_KB.view(-1)[:numel]
