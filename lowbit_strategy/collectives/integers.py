"""Sums of small integers over all ranks, exact and bit-packed: what methods with a shared scale use."""

from __future__ import annotations

import functools
from collections.abc import Generator

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.kernels.integers import pack_integers, packed_nbytes, unpack_integers


def sum_integers(q_WN: Tensor, limit: int, comm: Comm, *, scatter: bool) -> Generator[Pending, None, Tensor]:
    """Reduce-scatter or all-reduce of integers.

    1. row r of every rank goes to rank r, packed as narrow as ``[-limit, limit]`` allows
    2. rank r adds what it gets in int32
    3. all-reduce: the sums go to everyone, packed as narrow as ``[-W * limit, W * limit]`` allows, so that no world
       size overflows

    Args:
        q_WN: int32 [W, n] in ``[-limit, limit]``.
        limit: Largest magnitude.
        comm: Group.
        scatter: Stop after the second step.

    Returns:
        int32: the own row's sums [n] if `scatter`, else all rows' [W, n].
    """
    world_size, numel = q_WN.shape
    sent = pack_integers(q_WN, limit)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent)
    total_N = unpack_integers(received, numel, limit).sum(0, dtype=torch.int32)
    if scatter:
        return total_N
    packed_sum = pack_integers(total_N[None], world_size * limit)[0]
    gathered = torch.empty(world_size, packed_sum.numel(), dtype=torch.uint8, device=packed_sum.device)
    yield comm.all_gather(gathered, packed_sum)
    return unpack_integers(gathered, numel, world_size * limit)


def sum_nbytes(numel: int, limit: int, world_size: int, *, scatter: bool) -> int:
    """Bytes a rank sends for rows of `numel` elements."""
    nbytes = packed_nbytes(numel, limit)
    if not scatter:
        nbytes += packed_nbytes(numel, world_size * limit)
    return nbytes * (world_size - 1)


def all_of_bits(bits_WB: Tensor, comm: Comm) -> Generator[Pending, None, Tensor]:
    """Bitwise AND over all ranks of packed bits, uint8 [W, B], on every rank."""
    received = torch.empty_like(bits_WB)
    yield comm.all_to_all(received, bits_WB)
    gathered = torch.empty_like(bits_WB)
    yield comm.all_gather(gathered, functools.reduce(torch.bitwise_and, received))
    return gathered
