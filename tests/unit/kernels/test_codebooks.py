"""Codebooks fitted to a Gaussian."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit_strategy.kernels.codebooks import gaussian_codebook, lloyd_max, sent_share, unbiased_lloyd_max
from lowbit_strategy.kernels.format import ternary


def test_known_constants() -> None:
    assert gaussian_codebook(2)[1] == pytest.approx(math.sqrt(2 / math.pi), abs=2e-5)
    assert gaussian_codebook(4) == pytest.approx((-1.510, -0.4528, 0.4528, 1.510), abs=5e-4)
    assert gaussian_codebook(8)[4:] == pytest.approx((0.2451, 0.7560, 1.3439, 2.1519), abs=2e-4)  # Max, 1960, table I
    assert gaussian_codebook(3) == pytest.approx((-1.224, 0.0, 1.224), abs=1e-3)


@pytest.mark.parametrize("codebook_size", [2, 3, 4, 7, 8, 16])
def test_symmetric_ascending_and_short(codebook_size: int) -> None:
    codebook = gaussian_codebook(codebook_size)
    assert len(codebook) == codebook_size
    assert list(codebook) == sorted(codebook)
    assert all(a == -b for a, b in zip(codebook, reversed(codebook), strict=True))
    for value in codebook:
        mantissa, _ = math.frexp(value)
        assert mantissa * 2**16 == round(mantissa * 2**16)


def test_no_shift_lowers_the_error() -> None:
    """On a large Gaussian sample: moving any value either way makes the mean squared error worse."""
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))

    def error(codebook: tuple[float, ...]) -> float:
        table = torch.tensor(codebook)
        edges = (table[1:] + table[:-1]) / 2
        return float((x - table[torch.bucketize(x, edges)]).square().mean())

    best = gaussian_codebook(4)
    for i in range(4):
        for shift in (-0.05, 0.05):
            assert error((*best[:i], best[i] + shift, *best[i + 1 :])) > error(best)
    assert error(best) == pytest.approx(0.1175, abs=2e-3)  # Max, 1960, table I


def test_formats() -> None:
    assert lloyd_max(2, 64).bits_per_element == 2.25
    assert lloyd_max(1, 64).bits_per_element == 1.25
    assert ternary(128).bits_per_element == 1.75


@pytest.mark.parametrize("codebook_size", [0, 1, 64])
def test_refuses(codebook_size: int) -> None:
    with pytest.raises(ValueError, match="codebook_size must be from 2 to 16"):
        gaussian_codebook(codebook_size)


def test_unbiased_constants() -> None:
    assert sent_share(2) == pytest.approx(2 / math.pi, abs=1e-5)
    assert unbiased_lloyd_max(2, 64).codebook == pytest.approx((-1.2533, 1.2533), abs=1e-4)
    three, four = unbiased_lloyd_max(3, 128), unbiased_lloyd_max(4, 64)
    assert three.codebook == pytest.approx((-1.5114, 0.0, 1.5114), abs=1e-4)
    assert three.thresholds == pytest.approx((-0.612, 0.612), abs=1e-4)
    assert three.is_ternary
    assert three.bits_per_element == 1.75
    assert four.codebook == pytest.approx((-1.7115, -0.5131, 0.5131, 1.7115), abs=1e-4)
    assert four.thresholds == pytest.approx((-0.9816, 0.0, 0.9816), abs=1e-4)


@pytest.mark.parametrize("codebook_size", [2, 3, 4, 8])
def test_unbiased_values_on_a_gaussian(codebook_size: int) -> None:
    """What is sent has the whole input in it, and no other thresholds with unit gain have less error."""
    x = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0))
    fmt = unbiased_lloyd_max(codebook_size, 64)

    def scaled_error(thresholds: tuple[float, ...]) -> tuple[float, float]:
        q = torch.tensor(fmt.codebook)[torch.bucketize(x, torch.tensor(thresholds))]
        found = float((x * q).mean() / x.square().mean())
        return found, float((q / found - x).square().mean())

    found, error = scaled_error(fmt.thresholds)
    assert found == pytest.approx(1.0, abs=3e-3)
    for factor in (0.8, 1.2):
        assert scaled_error(tuple(t * factor for t in fmt.thresholds))[1] >= error - 1e-4
