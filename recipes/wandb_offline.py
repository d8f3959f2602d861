"""Figures of compression in Weights & Biases, without an account: an offline run, which ``wandb sync`` uploads later.

python recipes/wandb_offline.py --steps 60
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("WANDB_MODE", "offline")

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowbit_strategy import LoCo
from lowbit_strategy.lightning import CompressionMonitor, LowBitDDPStrategy


class Model(L.LightningModule):
    """A small regression."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/wandb")
    options = parser.parse_args()
    L.seed_everything(0)
    os.makedirs(options.out, exist_ok=True)
    logger = WandbLogger(project="lowbit", save_dir=options.out, config={"bits": 4}, log_model=False)
    trainer = L.Trainer(
        strategy=LowBitDDPStrategy(LoCo(bits=4)),
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices="auto" if torch.cuda.is_available() else 2,
        max_steps=options.steps,
        logger=logger,
        callbacks=[CompressionMonitor(every_n_steps=10, record=options.out)],
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    x = torch.randn(32 * options.steps, 64)
    trainer.fit(Model(), DataLoader(TensorDataset(x, x.flip(1).tanh()), batch_size=16))
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['train_loss']):.4f}; offline run in {logger.experiment.dir}")
        logger.experiment.finish()


if __name__ == "__main__":
    main()
