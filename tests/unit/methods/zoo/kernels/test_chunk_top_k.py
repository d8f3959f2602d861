"""The largest of each chunk against the plain definition."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.kernels.reference.select import top_k
from lowbit_strategy.methods.zoo.kernels.chunk_top_k import chunk_top_k, reference
from testing.kernels.row_cases import chunk_cases


def test_chunk_top_k_is_the_definition(path: str) -> None:
    for name, x, kept_M, room in chunk_cases():
        positions, values = chunk_top_k(x, kept_M, room)
        wanted, wanted_values = torch.zeros_like(positions), torch.zeros_like(values)
        reference(x, kept_M, wanted, wanted_values)
        assert torch.equal(positions, wanted), name
        assert torch.equal(values.view(torch.int32), wanted_values.view(torch.int32)), name
        for chunk in (0, 2, 3, 6):
            top = top_k(x[4096 * chunk : 4096 * (chunk + 1)], int(kept_M[chunk]))
            assert torch.equal(positions[chunk, : top.numel()].long(), top)


def test_chunk_top_k_refuses_other_sizes() -> None:
    for x, kept_M, room in ((4096, [1, 1], 1), (4095, [1], 1), (4096, [1], 0), (4096, [1], 4097)):
        with pytest.raises(ValueError, match="chunk_top_k takes"):
            chunk_top_k(torch.zeros(x), torch.tensor(kept_M, dtype=torch.int32), room)
