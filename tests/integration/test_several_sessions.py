"""Several models under one optimizer: all ranks end their sessions in the same order."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.optimizer_hook import _watching as watching
from lowbit_strategy.custom_loop import compress
from testing.processes.ranks import run_ranks


def train(rank: int, world_size: int) -> tuple[list[int], Tensor]:
    torch.manual_seed(0)
    other_heap = [object() for _ in range(3000 * rank)]  # addresses differ between ranks, as in real programs
    parts = [DistributedDataParallel(nn.Linear(24, 24)) for _ in range(6)]
    optimizer = torch.optim.AdamW(itertools.chain.from_iterable(part.parameters() for part in parts), lr=1e-3)
    sessions = [compress(part, optimizer, "loco") for part in parts]
    order = [sessions.index(session) for session in watching]
    for step in range(4):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(2 * step + rank))
        y = x
        for part in parts:
            y = part(y).relu()
        optimizer.zero_grad()
        (y - x).square().mean().backward()
        optimizer.step()
    for session in sessions:
        session.finish()
        session.close()
    del other_heap
    return order, torch.cat([param.detach().view(-1) for part in parts for param in part.parameters()])


def test_sessions_that_share_an_optimizer_end_in_the_order_in_which_they_were_made() -> None:
    (order, weights), (other_order, other_weights) = run_ranks(train, 2)
    assert order == other_order == list(range(6))
    assert torch.equal(weights, other_weights)
