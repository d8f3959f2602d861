"""A Llama-shaped model under Lightning's Trainer, one rank per GPU (on CPUs: some ranks of a tiny one).

Where there is one GPU, all ranks share it as if each were in another machine, with NCCL's sockets between them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from benchmarks.gpu_acceptance.training import apart
from lowbit_strategy.attach.constructors import policy_of

SIZES = {  # width, layers, heads, heads of keys and values, hidden, vocabulary, context, batch
    "cuda": (1024, 16, 16, 8, 2816, 32_000, 512, 4),
    "shared": (512, 8, 8, 4, 1408, 8_000, 256, 4),  # sockets between ranks on one GPU carry a few GB per second
    "cpu": (64, 2, 4, 2, 160, 128, 16, 4),
}


class Block(nn.Module):
    """Grouped-query attention with rotated positions, and a gated network."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        h_BTC = self.attention_norm(x_BTC)
        q, k, v = (part(h_BTC).view(B, T, -1, self.size).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.o(attended.transpose(1, 2).reshape(B, T, C))
        h_BTC = self.mlp_norm(x_BTC)
        return x_BTC + self.down(F.silu(self.gate(h_BTC)) * self.up(h_BTC))


def rotated(x_BHTD: Tensor) -> Tensor:
    half = x_BHTD.shape[-1] // 2
    turn = 10_000.0 ** (-torch.arange(half, device=x_BHTD.device) / half)
    angle_TD = torch.arange(x_BHTD.shape[2], device=x_BHTD.device)[:, None] * turn
    cos, sin = angle_TD.cos().to(x_BHTD.dtype), angle_TD.sin().to(x_BHTD.dtype)
    first, second = x_BHTD[..., :half], x_BHTD[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Llama(L.LightningModule):
    """Learns sequences whose every token is the one before plus one of three strides.

    Args:
        size: One of `SIZES`.
        recompute: Activation checkpointing of every block.
        mesh_of: HSDP that the module shards by itself: so many ranks have one model together.
    """

    def __init__(self, size: str, *, recompute: bool = False, mesh_of: int | None = None) -> None:
        super().__init__()
        width, layers, heads, kv_heads, hidden, self.vocabulary, self.context, self.batch = SIZES[size]
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, self.vocabulary, bias=False)
        self.recompute, self.mesh_of, self.sharded = recompute, mesh_of, False
        self.losses: list[Tensor] = []

    def configure_model(self) -> None:
        if self.mesh_of is None or self.sharded:
            return
        world_size = torch.distributed.get_world_size()
        shape = (world_size // self.mesh_of, self.mesh_of)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("replicate", "shard"))
        policy: MixedPrecisionPolicy = policy_of(str(self.trainer.precision))
        self.to(self.device)
        for block in self.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self, mesh=mesh, mp_policy=policy)
        self.sharded = True

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTC = checkpoint(block, x_BTC, use_reentrant=False) if self.recompute else block(x_BTC)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * batch_idx + self.global_rank)
        start = torch.randint(self.vocabulary, (self.batch, 1), generator=generator)
        stride = torch.randint(1, 4, (self.batch, 1), generator=generator)
        tokens = ((start + stride * torch.arange(self.context + 1)) % 97).to(self.device)
        logits = self(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class StepTimes(L.Callback):
    """Seconds of each optimizer step, the device waited for."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        self.at.append(time.perf_counter())


def llama(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Losses, peak memory and step time of one training on this rank.

    Options: ``strategy`` (made by a function, after the environment), ``precision``, ``steps``, ``accumulate``,
    ``recompute``, ``mesh_of``, ``per_node``: as if so many ranks shared a node; ``kind``: of device.
    """
    cuda = options["kind"] == "cuda"
    shared = cuda and world_size > torch.cuda.device_count()
    if shared:
        apart(rank)
        os.environ |= {"NODE_RANK": str(rank), "LOCAL_RANK": "0"}
    if options.get("per_node"):
        os.environ["LOCAL_WORLD_SIZE"] = str(options["per_node"])
    if cuda:
        torch.cuda.set_device(0 if shared else rank)
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    module = Llama(
        "shared" if shared else options["kind"],
        recompute=options.get("recompute", False),
        mesh_of=options.get("mesh_of"),
    )
    times = StepTimes()
    trainer = L.Trainer(
        strategy=options["strategy"](),
        accelerator="cuda" if cuda else "cpu",
        devices=1 if shared else world_size,
        num_nodes=world_size if shared else 1,
        precision=options["precision"],
        max_steps=options["steps"],
        accumulate_grad_batches=options.get("accumulate", 1),
        callbacks=[times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(folder),
    )
    trainer.fit(module, DataLoader(range(10_000)))  # type: ignore[arg-type]
    steps = sorted(after - before for before, after in zip(times.at, times.at[1:], strict=False))
    return {
        "losses": [float(loss) for loss in module.losses],
        "step_s": steps[len(steps) // 2],
        "peak_nbytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
    }
