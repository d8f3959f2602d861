"""Digests of tensors' bits. They depend on the type of device, but not on the backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.kernels.backends import is_native
from lowbit_strategy.kernels.native import function, isa
from lowbit_strategy.kernels.native.threads import run

_FACTOR = 0x5851F42D4C957F2D  # an odd factor of one part's sum, relative to the next
_MODULUS = 1 << 64


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Digests of tensors of any dtype, int64 ``[tensors]`` on `device`, over the bits in the order of elements, not of
    memory.

    One changed 64-bit word always changes the digest; other differences cancel about once in 2^64 cases.
    """
    if all(is_native(x.device) for x in tensors):
        return torch.tensor([_digest_in_c(x) for x in tensors], dtype=torch.int64, device=device)
    found = [digest(x).to(device).view(1) for x in tensors]
    return found[0] if len(found) == 1 else torch.cat(found)


def digest(x: Tensor) -> Tensor:
    """The digest of one tensor, an int64 scalar. For each part of as many words as there are weights:

    1. add the 64-bit words, each times the odd pseudo-random weight of its place; the last word is filled with zeros
    2. add this to the sum so far times an odd factor, all modulo 2^64

    On a GPU this takes two launches, unless there are several parts.
    """
    flat = x.detach().contiguous().view(-1).view(torch.uint8)
    missing = -flat.numel() % 8
    if missing or flat.data_ptr() % 8 or flat.storage_offset() % 8:
        flat = torch.nn.functional.pad(flat, (0, missing)).clone()
    words = flat.view(torch.int64)
    place_weights = _weights(x.device)
    sums = [(part * place_weights[: part.numel()]).sum() for part in words.split(place_weights.numel())]
    return functools.reduce(lambda total, added: total * _FACTOR + added, sums)


@functools.lru_cache(maxsize=2)
def _weights(device: torch.device) -> Tensor:
    """Odd pseudo-random int64 weights: splitmix64's finalizer applied to the places, with signed shifts.

    Their number is that of the words whose products are in memory at once: 1 MiB on CPU, for the cache; 32 MiB
    elsewhere, for few launches.
    """
    numel = 1 << (17 if device.type == "cpu" else 22)
    x = torch.arange(1, numel + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    x = (x ^ (x >> 31)) | 1
    if device.type == "cuda":  # made once in one stream, then read in others
        torch.cuda.current_stream(device).synchronize()
    return x


def _digest_in_c(x: Tensor) -> int:
    """The same as `digest`, computed in C by several threads."""
    x = x.detach().contiguous()
    place_weights, nbytes = _weights(x.device), x.numel() * x.element_size()
    part, summed = 8 * place_weights.numel(), function("lowbit_digest")
    name = isa().encode()

    def work(first: int, last: int) -> tuple[int, int]:
        span = first * part, min(last * part, nbytes)
        total = summed(name, x.data_ptr(), *span, place_weights.data_ptr(), place_weights.numel(), _FACTOR)
        return last - first, int(total)

    total = 0
    for num_parts, sum_of_parts in run(work, -(-nbytes // part), place_weights.numel()):
        total = (total * pow(_FACTOR, num_parts, _MODULUS) + sum_of_parts) % _MODULUS
    return total - _MODULUS * (total >= _MODULUS // 2)
