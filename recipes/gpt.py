"""A small GPT on bytes: the model of the demo, of the benchmarks and of the tests.

Shapes: B sequences, T positions, C channels, V = 256 byte values.
"""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Causal self-attention, then a two-layer network; each is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        B, T, C = x_BTC.shape
        qkv = self.qkv(self.attention_norm(x_BTC)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.attention_out(attended.transpose(1, 2).reshape(B, T, C))
        return x_BTC + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTC))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} does not split into {heads} heads: choose a multiple")
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # what a block adds starts smaller the more blocks add to one another
                std = 0.02 / math.sqrt(2 * depth) if name.endswith("_out.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV: Tensor = self.head(self.norm(x_BTC))
        return logits_BTV


class LanguageModel(L.LightningModule):
    """The GPT with its loss and optimizer. Nothing in it knows that gradients may be compressed.

    Args:
        width: Channels.
        depth: Blocks; the model has about ``12 * depth * width**2`` parameters.
        heads: Attention heads.
        context: Longest sequence.
        learning_rate: Peak of the schedule: a linear rise over `warmup_steps`, then a cosine to a tenth.
        warmup_steps: Optimizer steps of the rise.
    """

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        heads: int = 4,
        context: int = 128,
        learning_rate: float = 1e-3,
        warmup_steps: int = 50,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.gpt = GPT(width, depth, heads, context)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.gpt(tokens_BT)
        return logits_BTV

    def loss(self, batch: Batch) -> Tensor:
        tokens_BT, next_BT = batch
        return F.cross_entropy(self(tokens_BT).flatten(0, 1), next_BT.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def learning_rate_factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        num_steps = max(int(self.trainer.estimated_stepping_batches), self.warmup_steps + 1)
        progress = min((step - self.warmup_steps) / (num_steps - self.warmup_steps), 1.0)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


class MatrixOptimizerModel(LanguageModel):
    """The language model with an optimizer of their own for the blocks' matrices; all other parameters have AdamW."""

    automatic_optimization = False

    def matrix_optimizer(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise NotImplementedError("a subclass says which")

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        matrices = {name: param for name, param in named.items() if ".blocks." in name and param.ndim == 2}
        others = [param for name, param in named.items() if name not in matrices]
        adam = torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95))
        return [self.matrix_optimizer(list(matrices.values())), adam]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()
