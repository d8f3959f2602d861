"""Rows added in rank order: one pass of the kernel for floats that are sent as they are."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.collectives import ordered
from lowbit_strategy.collectives.comm import Pending, wait_for_all
from lowbit_strategy.collectives.ordered import add_rows_, sum_ordered, sum_rows
from testing.worlds.echo import EchoComm, Operations


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
    for world_size in (2, 16, 2, 16):  # tables are made when they are first needed
        comm = EchoComm(world_size)
        rows = torch.randn(world_size, 4096)
        out = torch.empty(4096)
        with Operations() as operations:
            for pending in sum_rows(rows[:, None], out[None], comm):
                pending.wait()
            for pending in sum_ordered(torch.randn(4096), comm):
                pending.wait()
        counts.append(len(operations.names))
    assert counts[2] == counts[3]


@pytest.mark.parametrize("message_nbytes", [1, 300, 4096, 2**28])
def test_a_large_message_goes_in_pieces_and_gives_the_same_bits(
    message_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks inside of a node, three nodes, 41 elements of each rank's row."""
    x = torch.randn(3, 2, 41, generator=torch.Generator().manual_seed(1)).transpose(0, 1)
    whole, pieces = torch.empty(3, 41), torch.full((3, 41), -1.0)
    largest: list[int] = []

    class Sees(EchoComm):
        def all_to_all(self, out_WB: torch.Tensor, x_WB: torch.Tensor) -> Pending:
            largest.append(x_WB.nbytes)
            return super().all_to_all(out_WB, x_WB)

    wait_for_all(sum_rows(x, whole, EchoComm(2), alpha=0.5))
    monkeypatch.setattr(ordered, "MESSAGE_NBYTES", message_nbytes)
    wait_for_all(sum_rows(x, pieces, Sees(2), alpha=0.5))
    assert torch.equal(whole, pieces)
    assert sum(largest) == x.nbytes
    assert max(largest) <= max(message_nbytes, 6 * 4)
    assert len(largest) == len(ordered.pieces_of_rows(41, 6 * 4))
