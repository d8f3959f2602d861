"""A LightningCLI script that knows nothing of compression: the strategy comes from its YAML file."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI

from testing.training.regression import Regression, loader


class Model(Regression):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr=lr)

    def train_dataloader(self) -> Any:
        return loader()


if __name__ == "__main__":
    cli = LightningCLI(Model, save_config_callback=None)
    strategy = cli.trainer.strategy
    sent = strategy.sync.ranks.peers.sent_nbytes > 0
    sys.stdout.flush()  # two processes share the pipe: a short write of its own is not torn apart
    print(f"trained {type(strategy).__name__} {strategy.sync.step_index} {sent}", flush=True)
    print("compressor", strategy.compressor)
    dist.destroy_process_group()
