"""A script that sets another default dtype gets the same results: methods name their dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.zoo.ef21 import EF21
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE = (64, 96)
MORE: dict[str, Compressor] = {"EF21 with momentum": EF21(momentum=0.9)}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def results(compressor: Compressor) -> list[torch.Tensor]:
    ranks = OneTensor(compressor, SHAPE, 2)
    return [ranks.step([gradient.clone() for gradient in gradients]) for gradients in GRADIENTS]


GRADIENTS = [[gaussian(SHAPE, 10 * step + rank) for rank in range(2)] for step in range(2)]
KNOWN = {**PRESETS, **MORE}


@pytest.mark.parametrize("name", KNOWN)
def test_the_default_dtype_makes_no_difference(name: str) -> None:
    expected = results(KNOWN[name])
    for dtype in (torch.float64, torch.bfloat16):
        with default_dtype(dtype):
            found = results(KNOWN[name])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
