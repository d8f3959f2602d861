"""How far a small mixture of experts ends from itself: trained in a plain loop, with first weights changed by 1e-4 of
their size, and with weights that are rounded to 8 bits when they are used, or get as much noise instead. Nothing of
this package takes part.

    python -m benchmarks.routing_noise --json benchmarks/results/routing_noise.json
    python -m benchmarks.routing_noise --first 3 --num 1 --noisy 3 --json benchmarks/results/routing_noise_seed3.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.mesh_training import CONTEXT, LAST, LEARNING_RATE, ExpertBlock, batch
from recipes.gpt import GPT
from recipes.text import standard_library
from testing.training.experts import MixtureOfExperts

BLOCK, LARGEST, CHANGE, RANKS = 128, 127, 1e-4, 4


def rounded(param: Tensor, noise: torch.Generator | None = None) -> Tensor:
    """8 bits for blocks of 128 elements; the gradient goes through. Vectors stay as they are.

    Args:
        param: Weights.
        noise: Gives, instead, noise that is even over a step of the code.
    """
    if param.ndim < 2:
        return param
    flat = F.pad(param.detach().flatten(), (0, -param.numel() % BLOCK)).view(-1, BLOCK)
    scale = (flat.abs().amax(1, keepdim=True) / LARGEST).clamp_min(1e-30)
    steps = flat / scale
    errors = steps.round() - steps if noise is None else torch.rand(steps.shape, generator=noise) - 0.5
    return param + (errors * scale).flatten()[: param.numel()].view_as(param)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = GPT(width=64, depth=2, heads=4, context=CONTEXT)
    for block in model.blocks:
        del block.mlp_norm, block.mlp_in, block.mlp_out
        block.__class__, block.mixture = ExpertBlock, MixtureOfExperts(64)
    return model


def last_loss(seed: int, steps: int, *, rounds: bool = False, changed: bool = False, noise: int | None = None) -> float:
    """The mean of the last 20 steps. `noise`: a seed of it."""
    model = model_of(seed)
    noises = None if noise is None else torch.Generator().manual_seed(noise)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters() if changed else ():
            param.add_(CHANGE * param.abs().mean() * torch.randn(param.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for step in range(steps):
        inputs, targets = zip(
            *(batch(standard_library("train"), RANKS * step + at) for at in range(RANKS)), strict=True
        )
        given = dict(model.named_parameters())
        params = {name: rounded(param, noises) for name, param in given.items()} if rounds or noises else given
        logits = functional_call(model, params, (torch.cat(inputs),))
        loss = F.cross_entropy(logits.flatten(0, 1), torch.cat(targets).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-LAST:]) / LAST


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 200,
    first: Annotated[int, typer.Option(help="first seed")] = 5,
    num: Annotated[int, typer.Option(help="seeds")] = 8,
    noisy: Annotated[int, typer.Option(help="runs of each with noise")] = 0,
    json_path: Annotated[Path, typer.Option("--json", help="results file")] = Path(
        "benchmarks/results/routing_noise.json"
    ),
) -> None:
    """Train each seed three times, and with noise."""
    torch.set_num_threads(1)
    results = []
    for seed in range(first, first + num):
        result = {
            "seed": seed,
            "plain": last_loss(seed, steps),
            "changed": last_loss(seed, steps, changed=True),
            "rounded": last_loss(seed, steps, rounds=True),
            "noisy": [last_loss(seed, steps, noise=each) for each in range(noisy)],
        }
        print(result, flush=True)
        results.append(result)
    json_path.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    typer.run(main)
