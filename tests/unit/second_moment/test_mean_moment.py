"""The second moment of local steps is that of mean gradients, and stays as it is where nothing is to be corrected."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Adam, Adamax, AdamW, NAdam, RAdam

from lowbit_strategy.collectives.comm import LocalComm
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.second_moment.mean_moment import MeanMoment

NUMEL = 4000


def second_moment(num_ranks: int, mean: float, noise: float, beta1: float, *, steps: int = 400, made=AdamW) -> float:
    """Of a rank whose gradients have this mean and this standard deviation; over elements and many steps."""
    param = nn.Parameter(torch.zeros(NUMEL))
    optimizer = made([param], lr=0.0, betas=(beta1, 0.95))
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(steps):
        param.grad = mean + noise * torch.randn(NUMEL, generator=generator)
        optimizer.step()
        MeanMoment(lambda: num_ranks).correct_(optimizer)
        v = optimizer.state[param]["exp_avg_sq"]
        assert v.min() >= 0
        if step >= 100:
            found.append(v.mean().item())
    return sum(found) / len(found)


@pytest.mark.parametrize(
    "made", [Adam, *(pytest.param(each, marks=pytest.mark.slow) for each in (AdamW, NAdam, RAdam))]
)
@pytest.mark.parametrize(("num_ranks", "beta1"), [(2, 0.9), (4, 0.95), (16, 0.9)])
def test_it_is_that_of_mean_gradients(num_ranks: int, beta1: float, made: type) -> None:
    for mean, noise in ((0.0, 1.0), (0.5, 1.0), (1.0, 0.1)):
        wanted = mean**2 + noise**2 / num_ranks
        assert second_moment(num_ranks, mean, noise, beta1, made=made) == pytest.approx(wanted, rel=0.03)


def test_of_more_ranks_than_the_first_moment_averages_over_it_is_the_first_moments_square() -> None:
    assert second_moment(100, 0.0, 1.0, 0.9) == pytest.approx(1 / 19, rel=0.03)


@given(num_ranks=st.integers(1, 64), beta1=st.floats(0, 0.99), beta2=st.floats(0, 0.999), steps=st.integers(1, 5))
def test_the_formula(num_ranks: int, beta1: float, beta2: float, steps: int) -> None:
    param = nn.Parameter(torch.zeros(8))
    optimizer = AdamW([param], lr=0.0, betas=(beta1, beta2))
    m, v = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(steps)
    k = (1 + beta1) / (1 - beta1)
    a = 1.0 if num_ranks == 1 else (1 / num_ranks - 1 / k) / (1 - 1 / k) if k > num_ranks else 0.0
    for step in range(1, steps + 1):
        g = param.grad = torch.randn(8, generator=generator)
        optimizer.step()
        MeanMoment(lambda: num_ranks).correct_(optimizer)
        m = beta1 * m + (1 - beta1) * g.double()
        v = beta2 * v + (1 - beta2) * (a * g.double() ** 2 + (1 - a) * (m / (1 - beta1**step)) ** 2)
    torch.testing.assert_close(optimizer.state[param]["exp_avg_sq"].double(), v, rtol=2e-3, atol=1e-5)


def test_nothing_is_corrected_where_there_is_one_rank_or_no_gradient() -> None:
    param, idle = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))
    optimizer = AdamW([param, idle])
    param.grad = torch.ones(8)
    optimizer.step()
    before = optimizer.state[param]["exp_avg_sq"].clone()
    MeanMoment(lambda: 1).stepped(optimizer)
    assert torch.equal(optimizer.state[param]["exp_avg_sq"], before)
    MeanMoment(lambda: 4).stepped(optimizer)
    assert not optimizer.state[idle]


def test_replicas_that_come_and_go_are_not_alone() -> None:
    assert not Ranks.flat(LocalComm()).coming_and_going().alone


def test_an_optimizer_without_a_second_moment_is_refused() -> None:
    param = nn.Parameter(torch.zeros(8))
    optimizer = Adamax([param])
    param.grad = torch.ones(8)
    optimizer.step()
    with pytest.raises(ValueError, match="Adamax does not, or not so: leave second_moment out"):
        MeanMoment(lambda: 2).correct_(optimizer)
