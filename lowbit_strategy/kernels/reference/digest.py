"""A digest of a tensor's bits in plain PyTorch: the definition."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

FACTOR = 0x5851F42D4C957F2D  # odd; of one part's sum against the next


def digest(x: Tensor) -> Tensor:
    """int64 scalar. In parts of one word per weight:

    1. the sum of the 64-bit words, each times the odd pseudo-random weight of its place, the last filled with zeros
    2. added to the sum so far times an odd factor; all modulo 2^64

    On a GPU two launches, unless there are several parts.
    """
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, missing)).clone()
    words = flat.view(torch.int64)
    place_weights = weights(x.device)
    sums = [(part * place_weights[: part.numel()]).sum() for part in words.split(place_weights.numel())]
    return functools.reduce(lambda total, added: total * FACTOR + added, sums)


@functools.lru_cache(maxsize=2)
def weights(device: torch.device) -> Tensor:
    """int64, odd and pseudo-random: the finaliser of splitmix64 over the places, with signed shifts.

    As many as there are words whose products are in memory at once: on CPU 1 MiB, for the cache; elsewhere 32 MiB, so
    that there are few launches.
    """
    numel = 1 << (17 if device.type == "cpu" else 22)
    x = torch.arange(1, numel + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    x = (x ^ (x >> 31)) | 1
    if device.type == "cuda":  # made in one stream, once, and read in others from now on
        torch.cuda.current_stream(device).synchronize()
    return x
