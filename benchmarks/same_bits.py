"""Hashes of the weights, and bytes sent, of every preset under DDP and FSDP2: to compare two trees.

    python -m benchmarks.same_bits new.json
    PYTHONPATH=../earlier python benchmarks/same_bits.py old.json

Two gloo ranks train a small network for ten steps. What the tree of `PYTHONPATH` has is measured.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.custom_loop import compress
from lowbit_strategy.methods.registry import PRESETS
from testing.processes.ranks import run_ranks

STEPS = 10


def measure(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    """By kind and preset: a hash of the weights, and bytes of gradients that this rank has sent."""
    torch.set_num_threads(1)
    return {f"{kind} {name}": train(rank, kind, name) for kind in ("ddp", "fsdp") for name in PRESETS}


def train(rank: int, kind: str, name: str) -> tuple[str, int]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(48, 160), nn.Tanh(), nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 24))
    model: nn.Module = net
    if kind == "ddp":
        model = DistributedDataParallel(net)
    else:
        for part in (net[0], net[2], net[4], net):
            fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = compress(model, optimizer, PRESETS[name])
    for step in range(STEPS):
        x = torch.randn(8, 48, generator=torch.Generator().manual_seed(100 * step + rank))
        (model(x) - x[:, :24]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.finish()
    found = hashlib.sha256()
    for param in net.parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        found.update(whole.detach().contiguous().numpy().tobytes())
    sent = session.sync.ranks.peers.sent_nbytes
    session.close()
    return found.hexdigest()[:12], sent


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(run_ranks(measure, 2, timeout=1500)[0], indent=1) + "\n")
