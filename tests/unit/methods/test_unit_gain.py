"""LoCo below 4 bits sends all of a constant gradient from its first steps on, without a warm-up or a reset."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.methods.registry import preset
from tests.worlds.one_tensor import OneTensor, gaussian

SHAPE, WORLD_SIZE = (192, 256), 4
PRESETS = ("loco1", "loco_ternary", "loco2", "loco3")


def shares(compressor: LoCo, steps: int) -> list[float]:
    """Share of a constant gradient in each step's mean, both hops, each rank with a batch's noise of three times it."""
    world = OneTensor(dataclasses.replace(compressor, exempt=(), high_precision=()), SHAPE, WORLD_SIZE)
    g, generator, found = gaussian(SHAPE, 1), torch.Generator().manual_seed(2), []
    for _ in range(steps):
        noise = 3.0 * torch.randn(WORLD_SIZE, *SHAPE, generator=generator)
        mean = world.step(list(g + noise)).view(SHAPE)
        found.append(float(((mean - noise.mean(0)) * g).sum() / g.square().sum()))
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sends_all_of_a_constant_gradient(name: str) -> None:
    compressor = preset(name)
    assert isinstance(compressor, LoCo)
    assert (compressor.warmup_steps, compressor.reset_steps) == (0, None)
    found = shares(compressor, 60)
    assert 0.95 <= min(found) <= max(found) <= 1.05, found  # from the first step, not only from the tenth


def test_fitted_values_send_less_at_first() -> None:
    found = shares(LoCo(bits=1, codebook="fitted", block_size=64, reset_steps=None, beta=0.95, return_beta=0.95), 12)
    assert found[0] < 0.45
    assert found[10] < 0.65
