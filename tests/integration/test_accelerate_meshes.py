"""Accelerate's `parallelism_config`, in code and in the file of its launcher, and models that are on a mesh already."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from lowbit_strategy import Dense
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.plan.mesh_dims import dims_of
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.processes.scripts import REPOSITORY, run_script
from testing.training.accelerated import fresh_state, fsdp_plugin, make
from testing.training.meshes import LOCO, WIDTH, net, place_in, wrapped

SCRIPT = REPOSITORY / "tests" / "integration" / "scripts" / "context_parallel.py"
TOKENS = 64
Context = Callable[..., contextlib.AbstractContextManager[None]]


class ByToken(nn.Module):
    """Every position by itself: torch has no attention over a split sequence on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(TOKENS, WIDTH), net(), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


def losses_of(model: nn.Module, optimizer: Any, backward: Any, context: Context, replica: int) -> list[float]:
    """Every rank of a replica has its part of each sequence."""
    losses = []
    for step in range(4):
        tokens = torch.randint(TOKENS, (4, 32), generator=torch.Generator().manual_seed(10 * step + replica))
        x, y = tokens.clone(), tokens.roll(1, 1)
        with context(buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={x, y}):
            assert x.shape == (4, 16)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain() -> list[float]:
    torch.manual_seed(0)
    model = ByToken()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "cp"))
    fully_shard(model, mesh=mesh["dp", "cp"]._flatten("all"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def context(**options: Any) -> Any:
        return context_parallel(mesh["cp"], **options)

    return losses_of(model, optimizer, Tensor.backward, context, mesh["dp"].get_local_rank())


def context_parallelism(folder: Path) -> Facts:
    """On four ranks with FSDP2, on eight with HSDP.

    On CPU Accelerate refuses a `ParallelismConfig`: what its constructor would do with one is done here.
    """
    replicas = dist.get_world_size() // 4
    found: dict[str, Any] = {"plain": plain()}
    for name, compressor in {"dense": Dense(), "loco": LOCO}.items():
        fresh_state()
        sharding = fsdp_plugin(by_block=False)
        made = Accelerator(fsdp_plugin=sharding)
        made.state.parallelism_config = config = ParallelismConfig(
            dp_replicate_size=replicas, dp_shard_size=2, cp_size=2
        )
        made.state.device_mesh = mesh = config.get_device_mesh("cpu")
        plugin = LowBitPlugin(compressor, **({"weights": "exact"} if name == "dense" else {}))
        plugin.attach(made, fsdp_plugin=sharding)
        torch.manual_seed(0)
        model = ByToken()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = made.prepare(model, optimizer)
        replica = mesh["dp"].get_local_rank()
        found[name] = losses_of(model, optimizer, made.backward, made.maybe_context_parallel, replica)
        binding = binding_of(made)
        assert binding is not None
        assert binding.sync is not None
        ranks = binding.sync.ranks
        found["ranks"] = ranks.peers.world_size, ranks.world_size, dims_of(binding.sync, 0)
    return found


@scenarios(context_parallelism, world_size=(4, 8), slow=all_but(world_size=4))
def test_context_parallelism(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["dense"] == pytest.approx(rank["plain"], rel=1e-5)
        assert rank["loco"] == pytest.approx(rank["plain"], rel=0.01)
        assert rank["ranks"] in (
            (4, 4, "dp_shard 2 x cp 2, compressed over dp_shard_cp"),
            (2, 8, "dp_replicate 2 x dp_shard 2 x cp 2, compressed over dp_replicate, exact over dp_shard_cp"),
        )


def on_a_mesh_already(folder: Path) -> Facts:
    """A model that is parallelized and sharded passes through `prepare`."""
    losses = {"stock": wrapped("fsdp").train(None, 4)}
    accelerator = make("fsdp", LowBitPlugin(Dense(), weights="exact"), fsdp_plugin=fsdp_plugin(by_block=False))
    run = wrapped("fsdp")
    run.model, optimizer = accelerator.prepare(run.model, run.optimizer)
    losses["dense"] = []
    for step in range(4):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * step + place_in(run.mesh)))
        loss = (run.model(x) - x.roll(1, 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses["dense"].append(loss.item())
    return losses


@pytest.mark.slow
@scenarios(on_a_mesh_already, world_size=4)
def test_on_a_mesh_already(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["dense"] == rank["stock"]


@pytest.mark.slow
def test_in_the_file_of_the_launcher(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        yaml.safe_dump(
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "NO_WRAP"},
                "parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_cp_size": 2},
                "num_processes": 4,
                "main_process_port": 0,
                "mixed_precision": "no",
                "lowbit_config": {"compressor": "loco", "exempt": []},
            }
        )
    )
    command = ["-m", "accelerate.commands.launch", "--config_file", job, SCRIPT, tmp_path]
    done = run_script(command, timeout=200, env={"ACCELERATE_USE_CPU": "true"})
    assert "mesh: dp_shard 2 x cp 2, compressed over dp_shard_cp" in done.stderr + done.stdout
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    for rank in ranks:
        assert rank["losses"][-1] < rank["losses"][0]
        assert (rank["batches"], rank["positions"]) == (4, 8)
