"""Dion: steps of low rank whose directions are all equally long; ranks exchange two thin matrices for each gradient.

    python -m recipes.dion --devices 2 --steps 200

The compressor keeps the momentum. Where others give the mean gradient of a matrix it gives the finished step, which
plain SGD takes. Vectors, embeddings and the head have AdamW.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lowbit_strategy import extend
from lowbit_strategy.lightning import LowBitDDPStrategy
from recipes.gpt import MatrixOptimizerModel
from recipes.text import Windows, standard_library


@dataclass(frozen=True, kw_only=True, slots=True)
class DionReducer(extend.Reducer):
    """Fields as in `Dion`. State of each matrix [n, m]: ``momentum`` [n, m], this rank's own; ``q`` [m, rank]."""

    rank: int
    momentum: float

    fixed_size: ClassVar[bool] = True

    def serves(self, spec: extend.TensorSpec) -> bool:
        return len(spec.shape) == 2 and self.rank <= min(spec.shape)

    def init(self, specs: Sequence[extend.TensorSpec], device: torch.device) -> dict[str, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return {
            spec.name: {
                "momentum": torch.zeros(spec.shape, device=device),
                "q": torch.randn(spec.shape[1], self.rank, generator=generator).to(device),
            }
            for spec in specs
        }

    def reduce(
        self,
        views: Sequence[extend.ParamView],
        state: dict[str, dict[str, Tensor]],
        comm: extend.Comm,
        step: extend.StepContext,
    ) -> Iterator[extend.Pending]:
        kept = [state[view.spec.name] for view in views]
        sums = [
            each["momentum"] + view.flat().float().view(view.spec.shape) for each, view in zip(kept, views, strict=True)
        ]
        ps = yield from _mean([b @ each["q"] for b, each in zip(sums, kept, strict=True)], comm)
        ps = [torch.linalg.qr(p).Q for p in ps]
        own = [b.T @ p for b, p in zip(sums, ps, strict=True)]
        means = yield from _mean(own, comm)
        for view, each, b, p, own_r, r in zip(views, kept, sums, ps, own, means, strict=True):
            rows, columns = view.spec.shape
            q = r / r.norm(dim=0).clamp(min=torch.finfo(torch.float32).tiny)
            usable = r.isfinite().all()  # an overflow reaches all ranks' results and nobody's state
            sent = p @ own_r.T
            each["momentum"].copy_(torch.where(usable, b - (1 - self.momentum) * sent, each["momentum"]))
            each["q"].copy_(torch.where(usable, q, each["q"]))
            view.trace(b, sent)
            view.write_mean_(((rows / columns) ** 0.5 * p @ q.T).reshape(-1), comm.rank)

    def num_messages(self, specs: Sequence[extend.TensorSpec], world_size: int) -> int:
        return 4  # both factors, each summed and gathered

    def wire_nbytes(self, spec: extend.TensorSpec, world_size: int) -> int:
        return sum(extend.ordered_nbytes(size * self.rank, 4, world_size) for size in spec.shape)


def _mean(tensors: Sequence[Tensor], comm: extend.Comm) -> Generator[extend.Pending, None, list[Tensor]]:
    """Of each over ranks; the same bits everywhere."""
    flat = yield from extend.sum_ordered(torch.cat([tensor.reshape(-1) for tensor in tensors]), comm)
    parts = (flat / comm.world_size).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@extend.configuration
class Dion(extend.Compressor):
    """The step of matrices, orthonormal and of low rank; other parameters stay dense.

    For a parameter G of n x m, with momentum M and Q [m, rank] of the step before, on every rank:

    1. ``B = M + G``
    2. ``P = B Q``, the mean over ranks, then orthonormal columns
    3. ``R = B^T P`` and its mean over ranks; ``M = B - (1 - momentum) P R^T`` with this rank's own R
    4. Q is the mean R with columns of length 1
    5. the result, which is not a gradient, is ``sqrt(n / m) P Q^T``: the optimizer has to be SGD without momentum

    Ranks' momenta differ; only their mean enters, so that the steps are those of one rank with the mean gradient.

    Args:
        rank: Of the step. Bytes grow with it.
        momentum: What is left in M of the directions that the step has taken.
        exempt: Parameters that stay dense; they need another optimizer.

    References:
        Ahn et al., "Dion: Distributed Orthonormalized Updates", 2025, arXiv 2504.05295.
    """

    name: ClassVar[str] = "dion"

    rank: int = 8
    momentum: float = 0.95
    exempt: tuple[Any, ...] = ("@vector", "@small", "@embedding", "@head")

    def method(self, spec: extend.TensorSpec) -> DionReducer:
        return DionReducer(rank=self.rank, momentum=self.momentum)


class DionModel(MatrixOptimizerModel):
    """The demo's model, whose matrices take the compressor's steps."""

    def matrix_optimizer(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(matrices, lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    trainer = L.Trainer(
        strategy=LowBitDDPStrategy(Dion(rank=options.rank)),
        accelerator="auto",
        devices=options.devices,
        max_steps=2 * options.steps,  # the Trainer counts each optimizer's steps
        logger=False,
        enable_checkpointing=False,
    )
    model, text = DionModel(64, 2, heads=4, context=64), Windows(standard_library("train"), 64)
    trainer.fit(model, DataLoader(text, batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print(f"training loss {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    main()
