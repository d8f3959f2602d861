"""Trying a level on a tensor: the same as what the method would send, and nothing is changed by it."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.adaptation.zoo.step_figures import try_level
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import PRESETS
from testing.worlds.single import SPECS, gradients

BY_NAME = {spec.name: spec for spec in SPECS}


def quantized(values: torch.Tensor, bits: int, block_size: int) -> torch.Tensor:
    """The definition once more: absmax / qmax a block, nearest."""
    blocks = values.view(-1, block_size)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / uniform(bits, block_size).qmax).bfloat16().float()
    qmax = uniform(bits, block_size).qmax
    return ((blocks / scale).round().clamp(-qmax, qmax) * scale).view(-1)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_energies_of_a_quantizer(bits: int) -> None:
    values = gradients(0)
    measured = try_level(LoCo(bits=bits, codebook="uniform", block_size=64), values, BY_NAME, seed=3)
    for name in ("blocks.0.weight", "blocks.1.weight"):
        compensated, sent, error = measured[name].tolist()
        expected = quantized(values[name], bits, 64)
        assert compensated == pytest.approx(float(values[name].square().sum()), rel=1e-5)
        assert sent == pytest.approx(float(expected.square().sum()), rel=0.02)  # scales round up
        assert error == pytest.approx(float((values[name] - expected).square().sum()), rel=0.05)
        product = (compensated + sent - error) / 2  # what a cosine is computed from
        assert product == pytest.approx(float(values[name] @ expected), rel=0.02)
    assert measured["bias"][2] == 0  # exempt: sent exactly


def test_dense_loses_nothing_and_inputs_stay() -> None:
    values = gradients(0)
    before = {name: value.clone() for name, value in values.items()}
    measured = try_level(Dense(), values, BY_NAME, seed=3)
    assert all(row[2] == 0 for row in measured.values())
    assert all(torch.equal(values[name], before[name]) for name in values)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_method_can_be_tried(name: str) -> None:
    compressor: Compressor = PRESETS[name]
    values = gradients(0)
    measured = try_level(compressor, values, BY_NAME, seed=3)
    assert measured.keys() == values.keys()
    assert all(bool(row.isfinite().all()) for row in measured.values())
    again = try_level(compressor, values, BY_NAME, seed=3)
    assert all(torch.equal(measured[name], again[name]) for name in measured)


def test_empty_and_scalar_tensors() -> None:
    specs = {spec.name: spec for spec in (TensorSpec("empty", (0,)), TensorSpec("scalar", ()))}
    values = {"empty": torch.empty(0), "scalar": torch.tensor([2.0])}
    assert try_level(LoCo(exempt=()), {"empty": values["empty"]}, specs, seed=0) == {}
    assert try_level(LoCo(exempt=()), values, specs, seed=0).keys() == {"scalar"}


def test_energies_of_very_small_gradients() -> None:
    """Squares of elements below 1e-19 are zero in float32, and the level would look as if it lost nothing."""
    values = {name: 1e-25 * value for name, value in gradients(0).items()}
    large = try_level(LoCo(bits=2, block_size=64), gradients(0), BY_NAME, seed=3)
    small = try_level(LoCo(bits=2, block_size=64), values, BY_NAME, seed=3)
    for name in ("blocks.0.weight", "blocks.1.weight"):
        assert float(small[name][2] / small[name][0]) == pytest.approx(float(large[name][2] / large[name][0]), rel=0.02)
        assert small[name][0] > 0
