"""The bound holds for every element; blocks take the bits that their values need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit_strategy.functional import Bounded


@given(
    st.integers(0, 1000), st.sampled_from([1e-6, 1e-3, 0.5, 7.0]), st.sampled_from([1e-4, 1.0, 1e5]), st.integers(0, 99)
)
def test_no_element_is_further_away_than_the_bound(numel: int, bound: float, size: float, seed: int) -> None:
    x = size * torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    code = Bounded(bound)
    decoded = code.decode(code.encode(x), numel)
    rounding = 2.0**-23 * x.abs().double()  # of the result to float32
    assert bool(((decoded.double() - x.double()).abs() <= bound * (1 + 1e-9) + rounding).all())


def test_bytes_follow_the_values() -> None:
    x = torch.zeros(4 * 128)
    code = Bounded(1e-3)
    assert code.encode(x).numel() == 4
    x[:128] = 0.002  # one step: q = 1, which takes two bits beside its sign's negative
    assert code.encode(x).numel() == 4 + 2 * 16
    x[128:256] = -0.002
    assert code.encode(x).numel() == 4 + (2 + 1) * 16


def test_what_is_not_finite_or_too_large_travels_as_it_is() -> None:
    x = torch.randn(3 * 128, generator=torch.Generator().manual_seed(0))
    x[5], x[6], x[130] = torch.nan, -torch.inf, 3e38
    code = Bounded(1e-3)
    decoded = code.decode(code.encode(x), x.numel())
    torch.testing.assert_close(decoded[:256], x[:256], rtol=0, atol=0, equal_nan=True)
    assert bool((decoded[256:] - x[256:]).abs().max() <= 1e-3)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan")])
def test_bounds_that_are_none(bound: float) -> None:
    with pytest.raises(ValueError, match="bound must be a positive number"):
        Bounded(bound)
