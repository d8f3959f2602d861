"""DGC's sampled threshold, and its configuration."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.kernels.reference.select import top_k
from lowbit_strategy.methods._base.momentum import MomentumCodec
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.sparsification.dgc import DGC, select_by_sample


def _values(kind: str, numel: int) -> torch.Tensor:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    return {"normal": x, "heavy": x**5, "rows": x * torch.linspace(0, 1, numel), "few": x.round()}[kind]


@pytest.mark.parametrize("kind", ["normal", "heavy", "rows", "few"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.25])
def test_the_sample_finds_nearly_the_largest(kind: str, density: float) -> None:
    x = _values(kind, 400_000)
    k = round(density * x.numel())
    chosen = select_by_sample(x, k, seed=3)
    assert 0.8 * k <= chosen.indices.numel() <= k
    assert torch.equal(chosen.indices, chosen.indices.unique())
    assert torch.equal(chosen.values, x[chosen.indices])
    assert torch.equal(chosen.indices, top_k(x, chosen.indices.numel()))


def test_a_small_tensor_gives_exactly_the_largest() -> None:
    x = _values("normal", 500)
    assert torch.equal(select_by_sample(x, 25, seed=0).indices, top_k(x, 25))


def test_zeros_are_never_sent() -> None:
    x = torch.zeros(100_000)
    assert not select_by_sample(x, 100, seed=0).indices.numel()
    x[70_000] = -2.0
    chosen = select_by_sample(x, 100, seed=0)
    assert chosen.indices.tolist() == [70_000]
    assert chosen.values.tolist() == [-2.0]


def test_warm_up_goes_through_its_stages() -> None:
    dgc = DGC(density=0.004, warmup_steps=10)
    densities = [dgc.at(step).density for step in range(40)]
    assert densities == [0.25] * 10 + [0.0625] * 10 + [0.015625] * 10 + [0.004] * 10
    assert dgc.at(35) == dgc.at(1_000_000) == DGC(density=0.004)
    assert dgc.at(0).method(TensorSpec("a", (8, 8))).continues(dgc.at(10).method(TensorSpec("a", (8, 8))))


def test_exempt_parameters_get_the_momentum_too() -> None:
    vector = TensorSpec("bias", (2000,))
    assert isinstance(DGC(momentum=0.9).assign(vector).method.uplink, MomentumCodec)
    assert not isinstance(DGC().assign(vector).method.uplink, MomentumCodec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0.0}, "density must be in"),
        ({"density": 1.5}, "density must be in"),
        ({"density": True}, "density must be a number"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"nesterov": True}, "nesterov=True needs"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
        ({"warmup_densities": (0.5, 0.0)}, "warmup_densities must be in"),
        ({"values": "float8"}, "values must be"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DGC(**options)
