"""Energies of tensors, and their sums over ranks."""

from __future__ import annotations

import math

import pytest
import torch

from lowbit_strategy.collectives.comm import LocalComm
from lowbit_strategy.telemetry.measure import energies, sum_over_ranks


def test_one_rank_sums_to_itself() -> None:
    values = torch.arange(6.0).view(2, 3)
    assert torch.equal(sum_over_ranks(values, LocalComm()), values.double())


@pytest.mark.parametrize("numel", [0, 1, 1000, 1024, 5000, 600_000])
@pytest.mark.parametrize("size", [1e-30, 1e-18, 1.0, 1e25, math.inf, math.nan])
def test_energies_are_those_of_float64(numel: int, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    h, sent = (torch.randn(numel, generator=generator).pow(5) for _ in range(2))
    h, sent = (x * size for x in (h, h + 0.01 * sent))
    wanted = [float(x.double().square().sum()) for x in (h, sent, (h - sent))]
    assert energies(h, sent).tolist() == pytest.approx(wanted, rel=1e-6, nan_ok=True)
