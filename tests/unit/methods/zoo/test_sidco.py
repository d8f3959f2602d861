"""SIDCo's fitted thresholds: the count is near the target, whatever the distribution, also of accumulated gradients."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods.zoo.sidco import (
    Distribution,
    SIDCo,
    default_stages,
    fitted_threshold,
    pareto_quantile,
)

_NUMEL = 210_000  # samples are a small part of it, else all of it would be sorted


def _values(kind: str, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(_NUMEL, generator=generator)
    uniform = torch.rand(_NUMEL, generator=generator) - 0.5
    return {
        "normal": normal,
        "laplace": -uniform.sign() * (1 - 2 * uniform.abs()).log(),
        "cubed": normal**3,
        "uniform": uniform,
        "sparse": normal * (uniform > 0.3),
    }[kind]


def _view(spec: TensorSpec) -> ParamView:
    x = torch.zeros(spec.numel)
    return ParamView(spec, 1, spec.numel, x=x, out=x)


@pytest.mark.parametrize("kind", ["normal", "laplace", "cubed", "uniform"])
@pytest.mark.parametrize("density", [0.01, 0.001])
def test_pareto_stages_reach_the_density(kind: str, density: float) -> None:
    magnitudes = _values(kind).abs()
    threshold = fitted_threshold(magnitudes, density, default_stages(density), "pareto")
    assert int((magnitudes >= threshold).sum()) == pytest.approx(density * _NUMEL, rel=0.2)


@pytest.mark.parametrize("distribution", get_args(Distribution))
@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_a_laplacian_is_met_by_all(distribution: Distribution, num_stages: int) -> None:
    magnitudes = _values("laplace").abs()
    for density in (0.5, 0.01):
        threshold = fitted_threshold(magnitudes, density, num_stages, distribution)
        assert int((magnitudes >= threshold).sum()) == pytest.approx(density * _NUMEL, rel=0.05)


@pytest.mark.parametrize("distribution", get_args(Distribution))
def test_equal_magnitudes_and_few_of_them(distribution: Distribution) -> None:
    assert fitted_threshold(torch.full((1000,), 2.0), 0.01, 3, distribution) > 0
    assert fitted_threshold(torch.tensor([3.0]), 0.001, 10, distribution) > 0
    assert fitted_threshold(torch.tensor([1e-30, 1e30]), 0.5, 1, distribution) > 0


def test_quantiles_are_those_of_the_distributions() -> None:
    exponential = torch.empty(1_000_000).exponential_(generator=torch.Generator().manual_seed(0)).double()
    mean, variance = float(exponential.mean()), float(exponential.var())
    wanted = (
        float(exponential.quantile(0.9)) if exponential.numel() < 1e6 else float(exponential.kthvalue(900_000).values)
    )
    assert pareto_quantile(mean, variance, 0.1) == pytest.approx(wanted, rel=0.01)  # kappa near 0
    assert pareto_quantile(1.0, 1.0, 0.1) == pytest.approx(2.302585, rel=1e-5)


@pytest.mark.parametrize("distribution", get_args(Distribution))
@pytest.mark.parametrize("kind", ["normal", "cubed", "sparse"])
def test_the_count_follows_the_density_of_accumulated_gradients(kind: str, distribution: Distribution) -> None:
    spec = TensorSpec("weight", (_NUMEL,))
    reducer = SIDCo(density=0.005, distribution=distribution).method(spec)
    tensors = reducer.init([spec], torch.device("cpu"))["weight"]
    counts = []
    for index in range(30):
        tensors["residual"].add_(_values(kind, index))
        chosen = reducer.choose(_view(spec), Sum(tensors["residual"]), tensors, StepContext(index, 100 + index, index))
        assert torch.equal(chosen.values, tensors["residual"][chosen.indices])
        tensors["residual"].index_fill_(0, chosen.indices, 0.0)
        counts.append(chosen.indices.numel())
    assert sum(counts[-10:]) / 10 == pytest.approx(reducer.num_kept(spec), rel=0.2)


def test_zeros_are_never_sent() -> None:
    spec = TensorSpec("weight", (10_000,))
    reducer = SIDCo(density=0.01).method(spec)
    tensors = reducer.init([spec], torch.device("cpu"))["weight"]
    assert not reducer.choose(_view(spec), Sum(tensors["residual"]), tensors, StepContext(0, 1, 1)).indices.numel()
    tensors["residual"][77] = 5.0
    assert reducer.choose(_view(spec), Sum(tensors["residual"]), tensors, StepContext(1, 2, 2)).indices.tolist() == [77]


def test_stages_follow_the_count_and_turn_round_where_that_is_wrong() -> None:
    spec = TensorSpec("weight", (_NUMEL,))
    reducer = SIDCo(density=0.001).method(spec)
    tensors = reducer.init([spec], torch.device("cpu"))["weight"]
    assert int(tensors["stages"]) == default_stages(0.001) == 5
    for ratio, stages in (
        (1.0, 5),
        (1.1, 5),
        (3.0, 4),  # too many: fewer stages
        (1.5, 3),
        (0.7, 4),  # too few: more
        (0.5, 3),  # and worse: the other way
        (0.6, 2),
        (0.7, 1),
        (0.75, 1),  # no way further
        (0.75, 2),
    ):
        for _ in range(5):
            reducer._adapt_stages_(tensors, ratio)
        assert int(tensors["stages"]) == stages


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="distribution must be"):
        SIDCo(distribution="normal")
    with pytest.raises(ValueError, match="density must be in"):
        SIDCo(density=-0.1)


@pytest.mark.parametrize(
    ("scales", "distribution", "density"),
    [
        ("spread", "pareto", 0.005),
        ("halves", "exponential", 0.01),  # the fit alone alternates between 0.2 and 3.1 times the target
        ("few large", "pareto", 0.005),  # 0.02 to 0.08 times
    ],
)
def test_rows_of_different_scale_stay_near_the_target(scales: str, distribution: Distribution, density: float) -> None:
    spec, row = TensorSpec("weight", (300, 1000)), torch.arange(300)
    reducer = SIDCo(density=density, distribution=distribution).method(spec)
    tensors = reducer.init([spec], torch.device("cpu"))["weight"]
    scale = {
        "spread": torch.logspace(-4, 0, 300),
        "halves": torch.where(row % 2 == 0, 1.0, 1e-3),
        "few large": torch.where(row % 100 == 0, 1.0, 1e-3),
    }[scales][:, None]
    ratios = []
    for index in range(20):
        x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(index)) * scale
        tensors["residual"].add_(x.view(-1))
        chosen = reducer.choose(_view(spec), Sum(tensors["residual"]), tensors, StepContext(index, 100 + index, index))
        tensors["residual"].index_fill_(0, chosen.indices, 0.0)
        ratios.append(chosen.indices.numel() / reducer.num_kept(spec))
    assert min(ratios) > 0.35
    assert max(ratios) <= 1.3
