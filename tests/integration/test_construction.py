"""A model that no rank could hold is built on the meta device, and no rank ever holds it: counted by the allocator."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lowbit_strategy import LoCo
from lowbit_strategy.fabric import LowBitFSDPStrategy as FabricStrategy
from lowbit_strategy.lightning import LowBitFSDPStrategy
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_any
from testing.counting.allocations import allocated, build, peak, reset_peak
from testing.processes.ranks import run_ranks
from testing.processes.scenarios import Facts, scenarios
from testing.training.regression import Regression, trainer

WIDE, BLOCKS = 768, 48
NUMEL = BLOCKS * WIDE * (WIDE + 1)
CPU = torch.device("cpu")

Way = Literal["meta device", "init_module", "real device"]


def large() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(BLOCKS)))


class MadeLate(Regression):
    """Its model is made in ``configure_model``, on the meta device or not."""

    def __init__(self, way: Way) -> None:
        super().__init__(nn.Identity())
        self.way = way

    def configure_model(self) -> None:
        if isinstance(self.net, nn.Identity):
            with torch.device("meta" if self.way == "meta device" else "cpu"):
                self.net = large()

    def loss(self, batch: Any) -> torch.Tensor:
        return self(batch[0].repeat(1, WIDE // 16)).square().mean()


class Peak(Callback):
    """What was allocated at most until the first step begins."""

    nbytes = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.nbytes = peak(CPU)


def built(rank: int, world_size: int, framework: str, way: Way) -> dict[str, Any]:
    """Bytes at most while the model is made and sharded, in models of float32."""
    from testing.training.regression import loader

    begin = functools.partial(trainer, LowBitFSDPStrategy(LoCo(), min_shard_numel=1), max_steps=1)
    begin().fit(Regression(), loader())  # what is imported and opened on the way
    before = allocated(CPU)
    reset_peak(CPU)
    if framework == "lightning":
        seen = Peak()
        model = MadeLate(way)
        trainer(LowBitFSDPStrategy(LoCo(), min_shard_numel=1), max_steps=2, callbacks=[seen]).fit(model, loader())
        most, net = seen.nbytes, model.net
    else:
        fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(LoCo(), min_shard_numel=1))
        fabric.launch()
        with fabric.init_module(empty_init=way == "init_module"):
            net = large()
        net = fabric.setup_module(net)
        most = peak(CPU)
        fabric.backward(net(torch.randn(2, WIDE)).square().mean())
    params = [param.to_local() for param in net.parameters() if isinstance(param, DTensor)]
    return {
        "models": (most - before) / (4 * NUMEL),
        "numel": sum(param.numel() for param in params),
        "random": all(param.isfinite().all() and param.std() > 0 for param in params if param.dim() > 1),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "way", "holds_it"),
    [
        ("lightning", "meta device", False),
        ("lightning", "real device", True),  # so that the count is known to see it
        ("fabric", "init_module", False),
    ],
)
def test_no_rank_ever_holds_the_whole_model(framework: str, way: Way, holds_it: bool, tmp_path: Path) -> None:
    library = str(build(tmp_path))
    env = {"LD_PRELOAD": library, "LOCAL_WORLD_SIZE": "2"}
    for found in run_ranks(built, 2, framework, way, timeout=150, env=env, process_group=None):
        assert found["numel"] == NUMEL // 2
        assert found["random"]
        if holds_it:
            assert found["models"] >= 1.0
        else:  # half a model, a residual of a byte for each parameter, and a block that is under way
            assert found["models"] < 0.5 + 0.26 + 3 / BLOCKS


def block_by_block(folder: Path) -> Facts:
    """On a device of their own, parameters wait for their turn: what is there unsharded is one block."""
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.BatchNorm1d(32))
    most = 0
    arrived: list[torch.Tensor] = []
    broadcast = dist.broadcast

    def seen(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal most
        arrived.append(tensor)
        whole = sum(param.numel() for param in net.parameters() if not isinstance(param, DTensor) and came(param))
        most = max(most, whole)
        return broadcast(tensor, **options)

    def came(param: torch.Tensor) -> bool:
        return any(each.data_ptr() == param.data_ptr() for each in arrived)

    with mock.patch.object(dist, "broadcast", seen):
        shard_any(net, init_device_mesh("cpu", (dist.get_world_size(),)), CPU, ShardPolicy(min_numel=1))
    full = torch.cat([param.full_tensor().flatten() for param in net.parameters()])  # type: ignore[attr-defined]
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.BatchNorm1d(32))
    wanted = torch.cat([param.detach().flatten() for param in reference.parameters()])
    return {"most": most, "same": torch.equal(full, wanted)}


@scenarios(block_by_block)
def test_a_block_is_sharded_before_the_next_one_is_brought(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"]
        assert rank["most"] <= 32 * 33
