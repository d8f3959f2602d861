"""Sums of squares beside those of float64."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit_strategy.kernels.norms import squared_norm


@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 5000])
@pytest.mark.parametrize("scale", [0.0, 1e-25, 1e-18, 1.0, 1e18, 1e30])
def test_it_is_that_of_float64(numel: int, scale: float) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * scale
    assert math.isclose(float(squared_norm(x)), float(x.double().square().sum()), rel_tol=1e-5)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_it_is_not_finite_where_an_element_is_not(value: float) -> None:
    x = torch.ones(2000)
    x[7] = value
    assert not math.isfinite(float(squared_norm(x)))
