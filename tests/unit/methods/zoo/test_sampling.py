"""Drawing in proportion to size: how many are drawn, and how far the mean of many draws is off."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit_strategy import ATOMO, Compressor, GSpar
from lowbit_strategy.methods.zoo.sampling import inclusion_probabilities
from testing.worlds.one_tensor import OneTensor, gaussian


@pytest.mark.parametrize("count", [1, 7, 100, 999, 1000])
def test_chances_add_up_and_grow_with_the_size(count: int) -> None:
    sizes = gaussian((1000,), 0).abs().pow(3)
    p = inclusion_probabilities(sizes, count)
    assert float(p.sum()) == pytest.approx(count, rel=2e-3)
    assert float(p.max()) <= 1.0
    uncertain = p < 1.0
    if uncertain.any():  # where nothing is certain, chance is proportional to size
        ratio = p[uncertain] / sizes[uncertain]
        assert float(ratio.max() / ratio.min()) == pytest.approx(1.0, rel=1e-3)
    assert not inclusion_probabilities(torch.zeros(5), 2).any()


def mean_of_draws(compressor: Compressor, gradient: Tensor, draws: int) -> tuple[float, float]:
    """How far one result and the mean of many are from the gradient, relative to it."""
    matrix = OneTensor(compressor, (gradient.shape[0], gradient.shape[1]), 1)
    results = [matrix.step([gradient]).view_as(gradient) for _ in range(draws)]
    first, mean = (results[0] - gradient).norm(), (torch.stack(results).mean(0) - gradient).norm()
    return float(first / gradient.norm()), float(mean / gradient.norm())


@pytest.mark.parametrize("compressor", [GSpar(density=0.2), ATOMO(rank=4)])
def test_what_is_drawn_is_right_on_average(compressor: Compressor) -> None:
    once, mean = mean_of_draws(compressor, gaussian((32, 48), 0), 400)
    assert once > 0.5
    assert mean < 2.0 * once / math.sqrt(400)
