"""Rows added in rank order: one pass of the kernel for floats that are sent as they are."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.collectives.ordered import add_rows_, sum_ordered, sum_rows
from tests.worlds.echo import EchoComm, Operations


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("world_size", "numel"), [(1, 5), (2, 1), (3, 1001), (8, 4096), (3, 0)])
def test_the_same_bits_as_one_addition_after_the_other(dtype: torch.dtype, world_size: int, numel: int) -> None:
    x = torch.randn(world_size, numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    wanted = x[0].float()
    for row in x[1:]:
        wanted = wanted + row
    wanted = (wanted * (1 / 3)).to(dtype)
    out = torch.empty(numel, dtype=dtype)
    add_rows_(x.clone(), out, alpha=1 / 3)
    assert torch.equal(out, wanted)


def test_no_pass_over_memory_for_each_rank() -> None:
    counts = []
    for world_size in (2, 16):
        comm = EchoComm(world_size)
        rows = torch.randn(world_size, 4096)
        out = torch.empty(4096)
        with Operations() as operations:
            for pending in sum_rows(rows, out, comm):
                pending.wait()
            for pending in sum_ordered(torch.randn(4096), comm):
                pending.wait()
        counts.append(len(operations.names))
    assert counts[0] == counts[1]
