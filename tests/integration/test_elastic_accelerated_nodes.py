"""Nodes that come and go under Accelerate and the HF Trainer: each a run of its own, whose ranks share one model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from testing.processes.ranks import run_ranks
from testing.processes.replicas import Replicas, ranks_of
from testing.training.accelerated import fsdp_plugin, make
from testing.training.comparing import fingerprint
from testing.training.regression import dataset, mlp

RULE = DiLoCo(every=5, momentum=0.5)
NUM_RANKS = 2


def plugin(elastic: Elastic | None) -> LowBitPlugin:
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None)
    return LowBitPlugin(compressor, outer=RULE, elastic=elastic, shard_size=NUM_RANKS)


def accelerator(elastic: Elastic | None) -> Any:
    return make("fsdp", plugin(elastic), fsdp_plugin=fsdp_plugin(by_block=False))


def train(elastic: Elastic | None, first_rank: int, steps: int) -> dict[str, Any]:
    """A loop whose data depends on the step and on the rank, as if replicas were in one world."""
    accelerate = accelerator(elastic)
    torch.manual_seed(0 if elastic is None else first_rank)
    net = mlp()
    model, optimizer = accelerate.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        at = (step * 2 * NUM_RANKS + first_rank + int(os.environ["RANK"])) * 4 % 96
        x, y = dataset()[at : at + 4]
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        accelerate.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    binding = binding_of(accelerate)
    assert binding is not None
    assert binding.sync is not None
    sent = binding.sync.ranks.peers.sent_nbytes
    binding.finish()
    facts = {"losses": losses, "print": fingerprint(model), "sent": sent}
    accelerate.end_training()
    return facts


def train_as_rank(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    return train(None, 0, steps)


def test_nodes_that_stay_train_as_nodes_of_one_world(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", train, 0, 22, num_ranks=NUM_RANKS)
        run.start("b", train, NUM_RANKS, 22, num_ranks=NUM_RANKS)
        names = [*ranks_of("a", NUM_RANKS), *ranks_of("b", NUM_RANKS)]
        replicas = run.results(*names)
    without = run_ranks(train_as_rank, 2 * NUM_RANKS, 22, process_group=None)
    assert [replicas[name] for name in names] == without


def train_from_loader(elastic: Elastic) -> dict[str, Any]:
    torch.manual_seed(0)  # the same on all replicas
    accelerate = accelerator(elastic)
    net = mlp()
    samples = list(zip(*dataset(96).tensors, range(96), strict=True))
    loader, model, optimizer = accelerate.prepare(
        DataLoader(samples, batch_size=4, shuffle=True), net, torch.optim.Adam(net.parameters())
    )
    seen: list[int] = []
    for x, y, index in loader:
        seen += index.tolist()
        accelerate.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == 24:
            break
    accelerate.end_training()
    return {"seen": seen, "batches": len(loader)}


def test_a_loader_gives_every_rank_of_every_node_other_samples(tmp_path: Path) -> None:
    names = [*ranks_of("a", NUM_RANKS), *ranks_of("b", NUM_RANKS)]
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, train_from_loader, num_ranks=NUM_RANKS)
        results = run.results(*names)
    assert sorted(index for name in names for index in results[name]["seen"]) == list(range(96))
    assert all(results[name]["batches"] == 12 for name in names)
