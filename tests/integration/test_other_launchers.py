"""Lightning and Fabric in processes that another launcher has started, which shows each of them one device (Ray)."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from testing.processes.ranks import run_ranks
from testing.training.regression import Regression, dataset


class OtherLauncher(LightningEnvironment):
    """Knows its ranks, whatever devices a Trainer counts."""

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def set_world_size(self, size: int) -> None:
        """Known already."""

    def set_global_rank(self, rank: int) -> None:
        """Known already."""

    def teardown(self) -> None:
        """Variables stay."""

    @property
    def creates_processes_externally(self) -> bool:
        return True


def _train(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in ("loco_ddp", "loco_fsdp"):
        torch.manual_seed(0)
        module = Regression()
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=1,
            plugins=[OtherLauncher()],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(dataset(), batch_size=4))
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        weights = torch.cat([each.detach().reshape(-1) for each in trainer.strategy.model.parameters()])  # type: ignore[union-attr]
        found[strategy] = (trainer.world_size, trainer.global_step, session.sync.ranks.world_size, weights)
    fabric = Fabric(strategy="loco_ddp", accelerator="cpu", devices=1, plugins=[OtherLauncher()])
    fabric.launch()
    loader: Any = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=4))
    found["fabric"] = len(loader)
    return found


def test_each_process_has_one_device() -> None:
    first, second = run_ranks(_train, 2, process_group=None)
    num_batches = -(-len(dataset()) // 4)
    for strategy in ("loco_ddp", "loco_fsdp"):
        world_size, steps, num_ranks, _ = first[strategy]
        assert (world_size, num_ranks) == (2, 2)
        assert steps == -(-num_batches // 2)
    assert torch.equal(first["loco_ddp"][3], second["loco_ddp"][3])
    assert first["fabric"] == -(-num_batches // 2)
