"""What is compared of models that have trained: whole weights, their bits, losses."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor, also of a sharded one; on all ranks together."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def full_parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: full(param) for name, param in module.named_parameters()}


def outcome(made: Any, model: Any) -> dict[str, Any]:
    """Of a `Regression` that a Lightning trainer has fitted with one of our strategies."""
    sync = made.strategy.sync
    assert sync is not None
    return {
        "losses": model.losses,
        "print": fingerprint(model),
        "sent": sync.ranks.peers.sent_nbytes,
        "compressor": type(sync.compressor).__name__,
    }


def fingerprint(module: nn.Module) -> int:
    """Of the bits of all parameters and buffers."""
    return checksum((*full_parameters(module).values(), *(full(buffer) for buffer in module.buffers())))


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of their bits."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def random_numbers() -> tuple[float, float, float]:
    """The next of all generators that a training script may draw from: torch's, Python's and numpy's."""
    return torch.rand(()).item(), random.random(), float(np.random.random())


def close(run: list[float], other: list[float], tolerance: float) -> bool:
    """Relative to the largest: sums of weights may cancel."""
    pairs = list(zip(run, other, strict=True))
    return max(abs(one - two) for one, two in pairs) <= tolerance * max(abs(value) for value in other)
