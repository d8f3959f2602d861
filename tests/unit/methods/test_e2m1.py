"""The floats of 4 bits in the place of LoCo's even grid: the same bytes, less noise in what is small in its block."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import preset
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE = (192, 256)


def second_moment(name: str, sizes: Tensor) -> Tensor:
    """Mean square of each element of the decoded mean over that of the exact one; four ranks, both hops."""
    compressor = preset(name)
    assert isinstance(compressor, LoCo)
    world = OneTensor(dataclasses.replace(compressor, exempt=(), high_precision=()), SHAPE, 4)
    generator = torch.Generator().manual_seed(0)
    decoded, exact = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(60):
        gradients = sizes * torch.randn(4, *SHAPE, generator=generator)
        mean = world.step(list(gradients)).view(SHAPE)
        if step >= 10:
            decoded += mean.square()
            exact += gradients.mean(0).square()
    return decoded / exact


def test_what_is_small_in_its_block_keeps_its_second_moment() -> None:
    sizes = torch.where(torch.arange(SHAPE[1]) % 2 == 0, 1.0, 0.3).expand(SHAPE)
    small = sizes < 1
    even, floats = second_moment("loco_uniform", sizes), second_moment("loco", sizes)
    assert floats[~small].mean() < 1.1 * even[~small].mean()  # large elements: as with the even grid
    assert floats[small].mean() - 1 < 0.5 * (even[small].mean() - 1)


def test_the_same_bytes_as_the_even_grid() -> None:
    even, floats = preset("loco_uniform"), preset("loco")
    assert isinstance(even, LoCo)
    assert isinstance(floats, LoCo)
    assert floats.fmt.wire_nbytes(100_001) == even.fmt.wire_nbytes(100_001)


def test_what_is_missed_is_sent_later() -> None:
    """The mean over steps of what ranks decode comes to the gradient, although a step alone is rounded."""
    compressor = LoCo(codebook="e2m1", exempt=(), high_precision=(), residual="float32", reset_steps=None)
    world, g = OneTensor(compressor, SHAPE, 2), gaussian(SHAPE, 1)
    sent = [world.step([g, g]).view(SHAPE) for _ in range(40)]
    one, mean = (sent[-1] - g).norm() / g.norm(), (torch.stack(sent[8:]).mean(0) - g).norm() / g.norm()
    assert mean < 0.5 * one


@pytest.mark.parametrize("codebook", [(-2.0, 0.0, 1.0), (-1.0, 0.0, 2.0)])
def test_the_largest_magnitude_needs_values_on_both_sides(codebook: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="as far below zero as above"):
        BlockFormat(bits=3, codebook=codebook)
