"""The largest elements of each chunk of a tensor: the public op, its definition, and its call of C."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.native import function, isa
from lowbit_strategy.kernels.native.threads import run
from lowbit_strategy.kernels.select import check_vector

CHUNK_NUMEL = 4096  # positions in a chunk take 12 bits


def chunk_top_k(x: Tensor, kept_M: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """The largest magnitudes of each chunk of 4,096 elements; of equal ones the first; NaN counts as largest.

    The arguments' shapes determine all shapes, so the host never waits.

    Args:
        x: float32 [M * 4096].
        kept_M: int32, number of elements from each chunk, 0 to `room`.
        room: Entries per chunk, at most 4,096.

    Returns:
        Positions in the chunk, int16 [M, room], ascending, and their values, float32; zeros beyond `kept_M`.
    """
    check_vector(x)
    if x.numel() != kept_M.numel() * CHUNK_NUMEL or kept_M.dtype != torch.int32 or not 0 < room <= CHUNK_NUMEL:
        raise ValueError(
            f"chunk_top_k takes {CHUNK_NUMEL} elements per entry of kept_M (int32) and room for 1 to {CHUNK_NUMEL},"
            f" got {x.numel()} elements, {kept_M.numel()} entries of {kept_M.dtype} and room={room}"
        )
    positions = torch.zeros(kept_M.numel(), room, dtype=torch.int16, device=x.device)
    values = torch.zeros(kept_M.numel(), room, dtype=torch.float32, device=x.device)
    if not kept_M.numel():
        return positions, values
    match backends.choose(x.device):
        case "torch":
            reference(x, kept_M, positions, values)
        case "native":
            in_c(x, kept_M, positions, values)
        case "triton":
            from lowbit_strategy.methods.zoo.kernels.triton import chunk_top_k as triton

            triton.chunk_top_k(x, kept_M, positions, values)
    return positions, values


def reference(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    """The `kept_M` largest magnitudes of each chunk: positions ascending, of equal ones the first, NaN before all."""
    chunk = x.numel() // kept_M.numel()
    x_MC = x.view(-1, chunk)
    keys_MC = x_MC.view(torch.int32) & 0x7FFFFFFF
    room = positions_MK.shape[1]
    order_MK = keys_MC.argsort(dim=1, descending=True, stable=True)[:, :room]
    is_free_MK = torch.arange(room, device=x.device) >= kept_M[:, None]
    chosen_MK = order_MK.masked_fill(is_free_MK, chunk).sort(1).values
    chosen_MK.masked_fill_(is_free_MK, 0)
    positions_MK.copy_(chosen_MK)
    values_MK.copy_(x_MC.gather(1, chosen_MK).masked_fill(is_free_MK, 0.0))


def in_c(x: Tensor, kept_M: Tensor, positions_MK: Tensor, values_MK: Tensor) -> None:
    kept_M, room = kept_M.contiguous(), positions_MK.shape[1]
    choose, name = function("lowbit_chunk_top_k"), isa().encode()
    addresses = kept_M.data_ptr(), room, positions_MK.data_ptr(), values_MK.data_ptr()
    run(lambda first, last: choose(name, x.data_ptr(), first, last, *addresses), kept_M.numel(), CHUNK_NUMEL)
