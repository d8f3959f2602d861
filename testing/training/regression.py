"""Small models, data and trainers for the tests that train."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lowbit_strategy import LoCo
from lowbit_strategy.lightning import AdaptiveCompression, LowBitDDPStrategy, LowBitFSDPStrategy

Kind = Literal["ddp", "fsdp", "hsdp"]
KINDS: tuple[Kind, ...] = ("ddp", "fsdp")
WIDTH, OUTPUTS, BATCH = 16, 8, 4
# Some of the tests' layers are sharded one by one, so that there are several buckets.
MIN_SHARD_NUMEL = 2000


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, OUTPUTS))


def dataset(num_samples: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    return TensorDataset(x, torch.tanh(x @ torch.randn(WIDTH, OUTPUTS, generator=generator) / 4))


def loader(num_samples: int = 96) -> DataLoader[Any]:
    return DataLoader(dataset(num_samples), batch_size=BATCH)


class Regression(L.LightningModule):
    """Any LightningModule: no ``configure_model``, nothing about strategies."""

    def __init__(self, net: nn.Module | None = None, *, optimizer: str = "adam", lr: float = 1e-2) -> None:
        super().__init__()
        self.net = net if net is not None else mlp()
        self.optimizer_name = optimizer
        self.lr = lr
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = [param for param in self.parameters() if param.requires_grad]
        if self.optimizer_name == "plain":
            return torch.optim.SGD(params, lr=self.lr)
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(params, lr=self.lr, momentum=0.9)
        return torch.optim.Adam(params, lr=self.lr, amsgrad=self.optimizer_name == "amsgrad")


class ByStep(Regression):
    """Its data depends on the step alone, so that a run resumes in the middle of an epoch where it was."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        at = (self.global_step * self.trainer.world_size + self.global_rank) * 4 % 96
        return super().training_step(dataset()[at : at + 4], batch_idx)


def strategy(kind: Kind, compressor: Any = None, **options: Any) -> LowBitDDPStrategy | LowBitFSDPStrategy:
    compressor = compressor if compressor is not None else LoCo(block_size=32)
    if kind == "ddp":
        return LowBitDDPStrategy(compressor, bucket_cap_mb=0.01, **options)
    if kind == "hsdp":  # a replica on each rank
        options["shard_size"] = 1
    return LowBitFSDPStrategy(compressor, min_shard_numel=MIN_SHARD_NUMEL, **options)


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    # Lightning removes the variable after its first run.
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "max_steps": 6,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(strategy=strategy, **(defaults | options))


def fit(kind: Kind, model: L.LightningModule, *, options: dict[str, Any] | None = None, **given: Any) -> L.Trainer:
    made = trainer(strategy(kind, **(options or {})), **given)
    made.fit(model, loader())
    return made


class SteadyTime(Callback):
    """Every step takes a second: decisions from measured times would differ from run to run, killed or not."""

    def __init__(self, adaptive: AdaptiveCompression) -> None:
        self._adaptive = adaptive

    def on_train_start(self, *_: Any) -> None:
        assert self._adaptive.driver is not None
        self._adaptive.driver.timer = functools.partial(next, itertools.count())
