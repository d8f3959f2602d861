"""AdaComp's choice in bins, against a loop over them."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.sparsification.adacomp import AdaComp, select_in_bins


@pytest.mark.parametrize(("numel", "bin_size"), [(1, 50), (49, 50), (1003, 50), (2000, 500)])
def test_the_choice_is_that_of_a_loop(numel: int, bin_size: int) -> None:
    generator = torch.Generator().manual_seed(numel)
    g, gradient = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    wanted = []
    for start in range(0, numel, bin_size):
        largest = g[start : start + bin_size].abs().max()
        wanted += [i for i in range(start, min(start + bin_size, numel)) if (g[i] + gradient[i]).abs() >= largest]
    assert select_in_bins(g, gradient, bin_size).tolist() == wanted


def test_a_bin_of_zeros_sends_nothing() -> None:
    g = torch.zeros(100)
    g[70] = 1.0
    assert select_in_bins(g, torch.zeros(100), 50).tolist() == [70]
    assert not select_in_bins(torch.zeros(100), torch.zeros(100), 50).numel()


def test_convolutions_have_smaller_bins() -> None:
    assert AdaComp().method(TensorSpec("conv", (8, 8, 3, 3))).bin_size == 50
    assert AdaComp().method(TensorSpec("linear", (80, 80))).bin_size == 500


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="bin_size must be"):
        AdaComp(bin_size=0)
    with pytest.raises(ValueError, match="values must be"):
        AdaComp(values="float8")
