"""A model under DDP, compressed, in a training loop of one's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.methods._base.compressor import Compressor
from testing.training.regression import WIDTH

CPU = torch.device("cpu")


class Loop:
    """SGD on inputs that differ between ranks."""

    def __init__(
        self,
        net: nn.Module,
        compressor: Compressor | None = None,
        options: SyncOptions | None = None,
        *,
        shape: tuple[int, ...] = (WIDTH,),
        has_scaler: bool = False,
        **ddp: Any,
    ) -> None:
        prepared = prepare(net, compressor or LoCo(block_size=32), options or SyncOptions(), scatter=False)
        self.net = net
        self.model = DistributedDataParallel(net, bucket_cap_mb=0.01, **ddp)
        self.session: Session = attach_ddp(self.model, prepared, device=CPU, has_scaler=has_scaler)
        self.optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        self._shape = shape

    def backward(self) -> None:
        x = torch.randn(4, *self._shape, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.optimizer.zero_grad()
        self.model(x).square().mean().backward()

    def step(self) -> None:
        self.session.begin_step()
        self.backward()
        self.optimizer.step()
        self.session.end_step()
