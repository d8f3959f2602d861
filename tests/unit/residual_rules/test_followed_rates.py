"""Residuals that follow the learning rate: what reaches the weights is conserved, in steps of any rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.learning_rates import LearningRates
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.residuals import read_residual
from lowbit_strategy.methods.registry import PRESETS, as_compressor
from lowbit_strategy.residual_rules.followed_rates import FollowedRates
from testing.invariants.harness import conserving_form
from testing.worlds.single import engine, gradients, reduce_step

NAME = "blocks.0.weight"
RATES = (0.25, 1.0, 0.5, 0.05, 0.05, 0.0501, 2.0)


def following(compressor: Compressor) -> GradientSync:
    sync = engine(compressor)
    FollowedRates(sync)
    return sync


class SameRate(LearningRates):
    def __init__(self, sync: GradientSync, rate: float) -> None:
        self._rates = dict.fromkeys([*sync.specs, "frozen"], rate)

    def rates(self) -> dict[str, float]:
        return self._rates


def begin(sync: GradientSync, rate: float) -> None:
    sync.ask_rates_of(SameRate(sync, rate))
    sync.begin_step()


def step(sync: GradientSync, at: int, rate: float) -> tuple[Tensor, Tensor]:
    """The gradient and the mean of one step."""
    begin(sync, rate)
    grads = gradients(at)
    return grads[NAME], reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})[NAME]


@pytest.mark.parametrize("name", ["efsignsgd", "topk", "powersgd", "loco"])
def test_what_steps_make_of_gradients_is_conserved(name: str) -> None:
    """The rate times the gradient, summed over steps, has arrived or is the last rate times what is unsent."""
    sync = following(conserving_form(as_compressor(name)))
    wanted = arrived = torch.zeros(48 * 64)
    for at, rate in enumerate(RATES):
        gradient, mean = step(sync, at, rate)
        wanted, arrived = wanted + rate * gradient, arrived + rate * mean
    unsent = sync.state.export_unsent(NAME)
    assert unsent is not None
    assert unsent.any()
    torch.testing.assert_close(arrived + RATES[-1] * unsent, wanted, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["loco", "topk"])
def test_a_rate_of_zero_loses_nothing(name: str) -> None:
    """Neither before the first rate nor between others."""
    sync, other = following(as_compressor(name)), engine(as_compressor(name))
    for at, rate in enumerate((0.0, 0.1, 0.0, 0.1)):
        step(sync, at, rate)
        step(other, at, 1.0)
        ours, theirs = sync.state.residual(NAME), other.state.residual(NAME)
        assert ours is not None
        assert torch.equal(ours, theirs)


def test_many_small_changes_add_up() -> None:
    """Scales of int8 residuals are bfloat16, in which each alone would be rounded away."""
    sync = following(as_compressor("loco"))
    step(sync, 0, 1.0)
    before = sync.state.residual(NAME)
    for at in range(1, 1001):
        begin(sync, 0.998**at)
        sync.roll_back()  # the state is as at the beginning of the step
    after = sync.state.residual(NAME)
    assert before is not None
    assert after is not None
    assert float(after.norm() / before.norm()) == pytest.approx(0.998**-1000, rel=0.1)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_only_residuals_follow(name: str) -> None:
    sync = following(as_compressor(name))
    for at in range(2):
        step(sync, at, 1.0)
    before = {key: tensor.clone() for key, tensor in sync.state.tensors(NAME).items()}
    unsent = read_residual(before) if "residual" in before else read_residual(before, "uplink.")
    begin(sync, 0.5)
    after = sync.state.tensors(NAME)
    assert all(
        torch.equal(after[key], value) for key, value in before.items() if "residual" not in key and key != "threshold"
    )
    if unsent is not None:
        residual = sync.state.residual(NAME)
        assert residual is not None
        assert float(residual.norm()) == pytest.approx(2 * float(unsent.norm()))


def test_rates_are_saved() -> None:
    sync, other = (following(as_compressor("loco")) for _ in range(2))
    step(sync, 0, 1.0)
    saved = capture(sync)
    restore(other, saved, load_rank=lambda _: saved, on_world_size_change="reset")
    assert torch.equal(step(sync, 1, 0.3)[1], step(other, 1, 0.3)[1])
