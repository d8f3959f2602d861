"""AdaComp's choice in bins, against a loop over them."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods.zoo.adacomp import AdaComp, select_in_bins


@pytest.mark.parametrize(("numel", "bin_size"), [(1, 50), (49, 50), (1003, 50), (2000, 500)])
def test_the_choice_is_that_of_a_loop(numel: int, bin_size: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    g, gradient = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    wanted = []
    for start in range(0, numel, bin_size):
        largest = g[start : start + bin_size].abs().max()
        wanted += [i for i in range(start, min(start + bin_size, numel)) if (g[i] + gradient[i]).abs() >= largest]
    assert select_in_bins(g, gradient, bin_size, most=bin_size).tolist() == wanted


def test_a_bin_of_zeros_sends_nothing() -> None:
    g = torch.zeros(100)
    g[70] = 1.0
    assert select_in_bins(g, torch.zeros(100), 50, most=50).tolist() == [70]
    assert not select_in_bins(torch.zeros(100), torch.zeros(100), 50, most=50).numel()


def test_convolutions_have_smaller_bins() -> None:
    assert AdaComp().bin_size_of(TensorSpec("conv", (8, 8, 3, 3))) == 50
    assert AdaComp().method(TensorSpec("linear", (80, 80))).bin_size == 500


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="bin_size must be"):
        AdaComp(bin_size=0)
    with pytest.raises(ValueError, match="values must be"):
        AdaComp(values="float8")


@pytest.mark.parametrize("bin_size", [50, 500])
def test_a_bin_sends_at_most_so_many_those_that_reach_furthest(bin_size: int) -> None:
    generator = torch.Generator().manual_seed(1)
    g, gradient = torch.randn(2003, generator=generator).round(), torch.randn(2003, generator=generator)
    everything = select_in_bins(g, gradient, bin_size, most=bin_size).tolist()
    kept = select_in_bins(g, gradient, bin_size, 7).tolist()
    reach = (g + gradient).abs()
    for start in range(0, 2003, bin_size):
        own = [i for i in everything if start <= i < start + bin_size]
        furthest = sorted(own, key=lambda i: (-float(reach[i]), i))[:7]
        assert [i for i in kept if start <= i < start + bin_size] == sorted(furthest)


@pytest.mark.parametrize("kind", ["normal", "laplace", "cubed"])
@pytest.mark.parametrize("bin_size", [50, 500])
def test_the_expected_count_is_near_the_real_one(kind: str, bin_size: int) -> None:
    """What reports and bytes are computed from, after the first steps."""
    numel, residual, counts = 500 * 200, torch.zeros(500 * 200), []
    generator = torch.Generator().manual_seed(3)
    for _ in range(40):
        x = torch.randn(numel, generator=generator)
        x = {"normal": x, "laplace": x.sign() * x.square(), "cubed": x**3}[kind]
        residual += x
        chosen = select_in_bins(residual, x, bin_size, most=bin_size)
        residual[chosen] = 0
        counts.append(chosen.numel())
    expected = AdaComp(bin_size=bin_size).method(TensorSpec("p", (200, 500))).num_kept(TensorSpec("p", (200, 500)))
    assert expected / 2.5 < sum(counts[20:]) / 20 < expected * 2.5
