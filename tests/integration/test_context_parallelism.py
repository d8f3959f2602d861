"""Context parallelism in Lightning and Fabric, whose modules shard themselves over the ranks of both dims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowbit_strategy.fabric import LowBitFSDPStrategy as FabricFSDPStrategy
from lowbit_strategy.lightning import LowBitFSDPStrategy
from testing.processes.scenarios import Facts, scenarios
from testing.training.meshes import LOCO, WIDTH

LENGTH = 8


class Attention(nn.Module):
    """Over a sequence of which each rank of `mesh` has an equal part."""

    mesh: DeviceMesh

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BTC: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTC).chunk(3, dim=-1)
        k, v = (all_gather_single_autograd(each.contiguous(), 1, self.mesh.get_group()) for each in (k, v))
        out: Tensor = x_BTC + self.out(F.scaled_dot_product_attention(q, k, v))
        return out


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention())


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """`mesh`: dims of data and of parts of sequences."""
    for part in model:
        assert isinstance(part, Attention)
        part.mesh = mesh[mesh.mesh_dim_names[1]]  # type: ignore[index]
    both = mesh._flatten()
    for part in (*model, model):
        fully_shard(part, mesh=both)


def own_mesh(name: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", name))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of this rank's part of the sequences."""
    part = x.chunk(2, dim=1)[dist.get_rank() % 2]
    return (model(part) - part.roll(1, -1)).square().mean()


class Lit(L.LightningModule):
    """On the strategy's mesh, or one that it makes."""

    def __init__(self, dim: str = "") -> None:
        super().__init__()
        self.net, self.dim, self.losses, self.batches = net(), dim, list[float](), list[float]()

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        shard(self.net, own_mesh(self.dim) if self.dim else mesh["data_parallel", "tensor_parallel"])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.batches.append(batch[0].sum().item())
        loss = loss_of(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


DATA = TensorDataset(torch.randn(16, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)))
SIZES: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 2}


def lightning(folder: Path) -> Facts:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    found = {}
    for name, strategy, model in (
        ("stock", ModelParallelStrategy(**SIZES), Lit()),
        ("dense", LowBitFSDPStrategy("dense", weights="exact", **SIZES), Lit()),
        ("own mesh", LowBitFSDPStrategy("dense", weights="exact"), Lit("cp")),
        ("loco", LowBitFSDPStrategy(LOCO), Lit("context_parallel")),
        ("name", "loco_fsdp", Lit("cp")),
    ):
        trainer: Any = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_steps=4, **quiet)
        trainer.fit(model, DataLoader(DATA, batch_size=2))
        ranks = trainer.strategy.sync.ranks.world_size if name != "stock" else None
        found[name] = (model.losses, model.batches, ranks)
    return found


def fabric(folder: Path) -> Facts:
    def parallelize(model: Any, mesh: DeviceMesh) -> Any:
        shard(model, mesh["data_parallel", "tensor_parallel"])
        return model

    def on_own_mesh(model: Any, mesh: DeviceMesh) -> Any:
        shard(model, own_mesh("cp"))
        return model

    found = {}
    for name, strategy in {
        "stock": FabricModelParallelStrategy(parallelize, **SIZES),
        "dense": FabricFSDPStrategy("dense", parallelize_fn=parallelize, weights="exact", **SIZES),
        "own mesh": FabricFSDPStrategy("dense", parallelize_fn=on_own_mesh, weights="exact"),
        "loco": FabricFSDPStrategy(LOCO, parallelize_fn=on_own_mesh),
    }.items():
        made: Any = L.Fabric(accelerator="cpu", devices=4, strategy=strategy)
        made.launch()
        model = made.setup_module(net())
        optimizer = made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses, batches = [], []
        for (x,) in made.setup_dataloaders(DataLoader(DATA, batch_size=2)):
            loss = loss_of(model, x)
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            batches.append(x.sum().item())
        ranks = made.strategy.sessions[0].sync.ranks.world_size if name != "stock" else None
        found[name] = (losses, batches, ranks)
    return found


def check(facts: list[Facts]) -> None:
    stock = [found["stock"] for found in facts]
    for rank, found in enumerate(facts):
        losses, batches, _ = stock[rank]
        assert batches == stock[rank ^ 1][1]  # of the other part of the same sequences
        for name, (ours, of_ours, ranks) in found.items():
            assert of_ours == batches
            assert ours == pytest.approx(losses, rel=2e-6 if name in ("stock", "dense", "own mesh") else 0.02)
            assert ranks == (None if name == "stock" else 4)


@scenarios(lightning, world_size=4)
def test_lightning(facts: list[Facts]) -> None:
    check(facts)


@pytest.mark.slow
@scenarios(fabric, world_size=4)
def test_fabric(facts: list[Facts]) -> None:
    check(facts)
