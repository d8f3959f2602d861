"""Options of the methods whose positions all ranks share."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.reducers.randomk import RandomK
from lowbit_strategy.reducers.scalecom import ScaleCom, largest_of_chunks
from lowbit_strategy.reducers.topk import TopK


@pytest.mark.parametrize("compressor", [RandomK, ScaleCom, TopK])
@pytest.mark.parametrize("density", [0.0, -0.5, 1.0001, "0.1"])
def test_a_density_outside_its_range_is_refused(compressor: type, density: object) -> None:
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\]"):
        compressor(density=density)


def test_bad_options_of_scalecom_are_refused() -> None:
    with pytest.raises(ValueError, match="beta must be in"):
        ScaleCom(beta=0.0)
    with pytest.raises(ValueError, match="selection must be"):
        ScaleCom(selection="random")


def test_the_largest_of_each_chunk() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.0, -5.0])
    assert largest_of_chunks(x, 3).tolist() == [1, 3, 6]
    assert largest_of_chunks(torch.zeros(5), 2).tolist() == [0, 2, 4]
