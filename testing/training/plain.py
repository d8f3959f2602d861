"""Plain loops: a small model, wrapped or sharded, its batches, and what its ranks hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo, TopK
from testing.training.regression import BATCH, WIDTH

COMPRESSORS = {
    "loco": LoCo(block_size=32, exempt=("@vector",)),
    "loco2": LoCo(bits=2, block_size=32, exempt=("@vector",)),
    "topk": TopK(density=0.1),
}


def wrap(kind: str, net: nn.Module, **options: Any) -> Any:
    """`options`: of DDP, or of ``fully_shard``."""
    if kind == "ddp":
        return DistributedDataParallel(net, bucket_cap_mb=0.01, **options)
    for child in net.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, **options)
    return fully_shard(net, **options)


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def local_values(params: Any) -> list[Tensor]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in params]


@torch.no_grad()
def load_local(params: Any, values: list[Tensor]) -> None:
    for p, value in zip(params, values, strict=True):
        (p.to_local() if hasattr(p, "to_local") else p).copy_(value)
