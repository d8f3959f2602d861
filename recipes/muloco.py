"""MuLoCo: Muon takes the local steps of matrices, 2-bit pseudo-gradients travel every 30 steps.

    python -m recipes.muloco --devices 2 --steps 120

Muon makes all directions of a step equally long, so that the ranks' movements are easier to code in few bits. Vectors,
embeddings and the head have AdamW. Two optimizers are one step for the rounds.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from lowbit_strategy import DiLoCo, LoCo
from lowbit_strategy.lightning import LowBitDDPStrategy
from recipes.gpt import MatrixOptimizerModel
from recipes.text import Windows, standard_library


class MuonModel(MatrixOptimizerModel):
    """The demo's model with Muon for its matrices."""

    def matrix_optimizer(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(matrices, lr=0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=30)
    options = parser.parse_args()
    two_bits = LoCo(bits=2, codebook="fitted", block_size=64, beta=0.0, reset_steps=None)
    trainer = L.Trainer(
        strategy=LowBitDDPStrategy(two_bits, outer=DiLoCo(every=options.every, lr=0.7, momentum=0.6)),
        accelerator="auto",
        devices=options.devices,
        max_steps=2 * options.steps,  # the Trainer counts each optimizer's steps
        logger=False,
        enable_checkpointing=False,
    )
    text = Windows(standard_library("train"), 64)
    trainer.fit(MuonModel(64, 2, heads=4, context=64), DataLoader(text, batch_size=8, shuffle=True))


if __name__ == "__main__":
    main()
