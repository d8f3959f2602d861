"""ScaleCom: options, and what its leader chooses."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods.zoo.scalecom import ScaleCom, largest_of_chunks


def test_bad_options_of_scalecom_are_refused() -> None:
    with pytest.raises(ValueError, match="beta must be in"):
        ScaleCom(beta=0.0)
    with pytest.raises(ValueError, match="selection must be"):
        ScaleCom(selection="random")


def test_the_largest_of_each_chunk() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, 0.0, 0.0, 0.0, -5.0])
    assert largest_of_chunks(x, 3).tolist() == [1, 3, 6]
    assert largest_of_chunks(torch.zeros(5), 2).tolist() == [0, 2, 4]
