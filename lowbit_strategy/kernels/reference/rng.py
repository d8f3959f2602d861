"""Counter-based random numbers: the same bits in PyTorch, C and Triton, with no state and no global generator.

The mixer is the public-domain 32-bit "lowbias32" finaliser (C. Wellons, 2018).
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
CODE_STREAM, RESIDUAL_STREAM = 0, 1
_Number = TypeVar("_Number", int, Tensor)


def hash32(x: _Number) -> _Number:
    """32 bits of an integer, or of each of an int64 tensor."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def stream_key(seed: int, salt: _Number, stream: int) -> _Number:
    """32-bit key of one segment's stream: every call has a seed, every segment a salt, every use a stream."""
    return hash32(hash32(salt ^ seed) + stream)


def dither(first: int, numel: int, key: int, device: torch.device) -> Tensor:
    """float32 [numel], uniform in [-0.5, 0.5) on a grid of 2**-24: a hash of (key, first + i) modulo 2**32."""
    return dither_at(torch.arange(first, first + numel, dtype=torch.int64, device=device), key)


def dither_at(index: Tensor, key: Tensor | int) -> Tensor:
    """`dither` at any elements: int64 indices and keys that broadcast."""
    return (hash32(index * GOLDEN + key) >> 8).to(torch.float32) * 2.0**-24 - 0.5
