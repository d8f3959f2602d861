"""Training through Fabric, in its own loop."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from testing.training.regression import dataset

Batches = list[tuple[Tensor, Tensor]]


def launch(strategy: Any, **options: Any) -> L.Fabric:
    made = L.Fabric(accelerator="cpu", devices=torch.distributed.get_world_size(), strategy=strategy, **options)
    made.launch()
    return made


def batches(rank: int, start: int = 0, stop: int = 8) -> Batches:
    data = dataset()
    return [data[(2 * i + rank) * 4 : (2 * i + rank + 1) * 4] for i in range(start, stop)]


def setup(made: L.Fabric, net: nn.Module, lr: float = 1e-2) -> tuple[Any, Any]:
    return made.setup(net, torch.optim.Adam(net.parameters(), lr=lr))


def train(made: L.Fabric, model: Any, optimizer: Any, data: Batches) -> list[float]:
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        made.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses
