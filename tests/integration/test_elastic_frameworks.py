"""Replicas that come and go under Accelerate and Fabric, each its own world."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.fabric import LowBitDDPStrategy
from testing.processes.ranks import free_port, run_ranks
from testing.processes.replicas import Replicas, ranks_of
from testing.processes.scripts import REPOSITORY, run_script
from testing.training.accelerated import fsdp_plugin, make
from testing.training.comparing import fingerprint
from testing.training.regression import dataset, mlp

RULE = DiLoCo(every=5, momentum=0.5)


def accelerator_of(elastic: Elastic | None, num_ranks: int) -> Accelerator:
    """Compressed; `num_ranks` share one model."""
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None)
    if num_ranks > 1:
        plugin = LowBitPlugin(compressor, outer=RULE, elastic=elastic, shard_size=num_ranks)
        return make("fsdp", plugin, fsdp_plugin=fsdp_plugin(by_block=False))
    return make("ddp", LowBitPlugin(compressor, outer=RULE, elastic=elastic))


def train(elastic: Elastic | None, first_rank: int, num_ranks: int, steps: int) -> dict[str, Any]:
    """A loop whose data depends on the step and on the rank, as if replicas were in one world."""
    accelerator = accelerator_of(elastic, num_ranks)
    torch.manual_seed(0 if elastic is None else first_rank)
    net = mlp()
    model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    rank = first_rank + int(os.environ.get("RANK", "0"))
    losses = []
    for step in range(steps):
        at = (step * 2 * num_ranks + rank) * 4 % 96
        x, y = dataset()[at : at + 4]
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    binding = binding_of(accelerator)
    assert binding is not None
    assert binding.sync is not None
    sent = binding.sync.ranks.peers.sent_nbytes
    binding.finish()
    facts = {"losses": losses, "print": fingerprint(accelerator.unwrap_model(model)), "sent": sent}
    accelerator.end_training()
    return facts


def train_as_rank(rank: int, world_size: int, num_ranks: int, steps: int) -> dict[str, Any]:
    return train(None, 0, num_ranks, steps)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_members_that_stay_train_as_ranks_of_one_world(tmp_path: Path, num_ranks: int) -> None:
    names = [*ranks_of("a", num_ranks), *ranks_of("b", num_ranks)]
    with Replicas(tmp_path) as run:
        run.start("a", train, 0, num_ranks, 22, num_ranks=num_ranks)
        run.start("b", train, num_ranks, num_ranks, 22, num_ranks=num_ranks)
        replicas = run.results(*names)
    without = run_ranks(train_as_rank, 2 * num_ranks, num_ranks, 22, process_group=None)
    assert [replicas[name] for name in names] == without


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loader_gives_every_rank_of_every_replica_other_samples(tmp_path: Path, num_ranks: int) -> None:
    names = [*ranks_of("a", num_ranks), *ranks_of("b", num_ranks)]
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, train_from_loader, num_ranks, num_ranks=num_ranks)
        results = run.results(*names)
    assert sorted(index for seen, _ in results.values() for index in seen) == list(range(96))
    assert all(num_batches == 24 // num_ranks for _, num_batches in results.values())


def train_from_loader(elastic: Elastic, num_ranks: int) -> tuple[list[int], int]:
    """The samples that a rank has seen in half of an epoch, and how many batches one has."""
    torch.manual_seed(0)  # the same on all replicas
    accelerator = accelerator_of(elastic, num_ranks)
    model = mlp()
    samples = list(zip(*dataset(96).tensors, range(96), strict=True))
    loader, model, optimizer = accelerator.prepare(
        DataLoader(samples, batch_size=4, shuffle=True), model, torch.optim.Adam(model.parameters())
    )
    seen: list[int] = []
    for x, y, index in loader:
        seen += index.tolist()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if num_ranks * len(seen) == 48:
            break
    accelerator.end_training()
    return seen, len(loader)


def train_in_fabric(elastic: Elastic, seed: int) -> int:
    """Nothing but Fabric's own calls; replicas begin with weights that differ."""
    torch.manual_seed(seed)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=LowBitDDPStrategy(LoCo(), outer=RULE, elastic=elastic))
    fabric.launch()
    net = mlp()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    for step in range(15):
        x, y = dataset()[4 * step : 4 * step + 4]
        fabric.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(net)


@pytest.mark.slow
def test_fabric_s_replicas_meet_before_the_first_forward_pass(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for seed, name in enumerate("ab"):
            run.start(name, train_in_fabric, seed)
        results = run.results("a", "b")
    assert results["a"] == results["b"]  # at the end of a round


SCRIPT = REPOSITORY / "tests" / "integration" / "scripts" / "replica.py"
LAUNCH = ["-m", "accelerate.commands.launch"]


ON_CPU = {"ACCELERATE_USE_CPU": "true"}
SHARDED = {
    "distributed_type": "FSDP",
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_reshard_after_forward": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("is_node", [False, True])
def test_launched_with_a_section(tmp_path: Path, is_node: bool) -> None:
    """`accelerate launch` as on two machines, of a script that knows nothing of replicas."""
    with Replicas(tmp_path) as run:

        def launch(name: str) -> list[dict[str, Any]]:
            elastic = {"lighthouse": run.elastic(name).lighthouse, "name": name, "min_replicas": 2}
            section = {"compressor": "loco", "outer": {"name": "diloco", "every": 5}, "elastic": elastic}
            kind: dict[str, Any] = {"distributed_type": "NO", "num_processes": 1}
            if is_node:
                section["shard_size"] = "node"
                kind = SHARDED | {"main_process_port": free_port()}
            job, out = tmp_path / f"{name}.yaml", tmp_path / f"{name}.json"
            job.write_text(yaml.safe_dump({**kind, "use_cpu": not is_node, "lowbit_config": section}))
            done = run_script([*LAUNCH, "--config_file", job, SCRIPT, "--out", out], env=ON_CPU, timeout=200)
            assert "2 replicas (a, b)" in done.stderr
            return [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}*.json"))]

        with ThreadPoolExecutor() as machines:
            ranks = [rank for machine in machines.map(launch, "ab") for rank in machine]
    assert len(ranks) == (4 if is_node else 2)
    a, b = (rank["total"] for rank in ranks if rank["total"] is not None)
    assert a == b
    seen = [index for rank in ranks for index in rank["seen"]]
    assert len(set(seen)) == len(seen) == 96
    assert all(rank["type"] == ("FSDPSequential" if is_node else "Sequential") for rank in ranks)
