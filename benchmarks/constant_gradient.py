"""How much of a constant gradient each of LoCo's codebooks says, step by step, and after a residual is forgotten.

One matrix on four simulated ranks with the real engine, both hops. Every rank has the same constant gradient (standard
normal) and noise of its own, new in every step, three times as large, about what a batch's gradient is. The share is
the projection of the mean, less the ranks' mean noise, on the constant gradient.

    python -m benchmarks.constant_gradient --json benchmarks/results/constant_gradient.json
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from lowbit_strategy.methods.loco import LoCo
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE, WORLD_SIZE, NOISE, RESET = (192, 256), 4, 3.0, 150

_BASE = LoCo(bits=1, codebook="fitted", block_size=64, reset_steps=RESET, exempt=(), high_precision=())
VARIANTS = {
    "fitted, 1 bit, beta 0.95": dataclasses.replace(_BASE, beta=0.95, return_beta=0.95),
    "fitted, 2 bits, beta 0.95": dataclasses.replace(_BASE, bits=2, beta=0.95, return_beta=0.95),
    "unit gain, 1 bit, beta 0.8": dataclasses.replace(_BASE, codebook="unit_gain", beta=0.8, return_beta=0.8),
    "unit gain, 2 bits, beta 0.8": dataclasses.replace(_BASE, bits=2, codebook="unit_gain", beta=0.8, return_beta=0.8),
}


def measure(compressor: LoCo, steps: int, noise: float = NOISE) -> dict[str, list[float]]:
    """Of each step: the share of the constant gradient in the mean, and the mean's root mean square over that of the
    uncompressed mean, by which Adam divides.
    """
    world = OneTensor(compressor, SHAPE, WORLD_SIZE)
    g, generator = gaussian(SHAPE, 1), torch.Generator().manual_seed(2)
    shares, sizes = [], []
    for _ in range(steps):
        noise_WN = noise * torch.randn(WORLD_SIZE, *SHAPE, generator=generator)
        mean, others = world.step(list(g + noise_WN)).view(SHAPE), noise_WN.mean(0)
        shares.append(round(float(((mean - others) * g).sum() / g.square().sum()), 4))
        sizes.append(round(float(mean.norm() / (g + others).norm()), 4))
    return {"share": shares, "size": sizes}


def main(
    steps: Annotated[int, typer.Option(help="steps; the residual is forgotten at 150")] = 240,
    json_path: Annotated[Path, typer.Option("--json", help="results file")] = Path(
        "benchmarks/results/constant_gradient.json"
    ),
) -> None:
    """Measure all variants, with noise and without."""
    torch.set_num_threads(1)
    found = {
        name: {"noise": measure(each, steps), "none": measure(each, steps, 0.0)} for name, each in VARIANTS.items()
    }
    json_path.write_text(json.dumps({"reset_steps": RESET, "variants": found}) + "\n")
    for name, curves in found.items():
        for kind, curve in curves.items():
            print(
                name,
                kind,
                *(f"{what} {values[0]:.2f} {values[10]:.2f} {values[140]:.2f}" for what, values in curve.items()),
            )


if __name__ == "__main__":
    typer.run(main)
