"""How long rounds are: a controller, the loss and a warm-up of the learning rate change it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lowbit_strategy import (
    AdaComm,
    LocalSGD,
    Quadratic,
)
from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.control.base import Controller, Decision, Telemetry
from lowbit_strategy.methods._base.compressor import Compressor
from testing.log import listen
from testing.worlds.replicas import Replicas


@dataclass(frozen=True)
class Longer(Controller):
    """Rounds of 4 steps from the first turn on."""

    levels: tuple[Compressor, ...] = ()

    def init(self, specs: Any, world_size: int) -> dict[str, Any]:
        return {}

    def decide(self, telemetry: Telemetry, state: dict[str, Any]) -> Decision:
        return Decision(state={"step": telemetry.progress.step}, every=4)


def test_a_controller_changes_the_length_of_rounds() -> None:
    ranks = Replicas(LocalSGD(every=2))
    for outer in ranks.outers:
        AdaptiveDriver(Longer(), outer.sync)
    turns = []
    for seed in range(12):
        ranks.step(seed)
        turns.append(ranks.outers[0].num_syncs)
    assert turns == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]
    ranks.world.close()


def test_rounds_become_shorter_with_the_loss() -> None:
    """Every rank learns the mean of all ranks' losses, so all have the same rounds; one without a loss stops that."""
    ranks = Replicas(LocalSGD(every=AdaComm(start=8, minimum=2)), world_size=3)
    lengths = []
    for step in range(24):
        for rank, outer in enumerate(ranks.outers):
            outer.begin_backward(torch.tensor((1.0, 2.0, 6.0)[rank] / (1 if step < 8 else 4)))
        ranks.together(lambda rank: ranks.outers[rank].after_step(0.1))
        lengths.append({outer.round_length for outer in ranks.outers})
    assert lengths[:16] == [{8}] * 16
    assert lengths[16:] == [{8}] * 7 + [{4}]  # half of the root; the last round's loss came with its turn
    ranks.outers[0].begin_backward(float("nan"))
    assert ranks.outers[1].state_dict()["losses"]["means"] == [3.0, 0.75]
    ranks.world.close()


@pytest.mark.parametrize("knows", [True, False])
def test_a_rule_that_needs_a_loss_says_so_once(knows: bool) -> None:
    ranks = Replicas(LocalSGD(every=AdaComm(start=2, minimum=1)))
    with listen() as lines:
        for step in range(8):
            for rank, outer in enumerate(ranks.outers):
                outer.begin_backward(torch.tensor(1.0) if knows or rank or step > 3 else None)
            ranks.together(lambda rank: ranks.outers[rank].after_step(0.1))
    assert [line for line in lines if "by the loss" in line] == ([] if knows else lines)
    assert len(lines) == (0 if knows else 1)
    ranks.finish()


@pytest.mark.parametrize("peak", [None, 8e-3])
def test_rounds_of_a_warm_up_are_no_longer_than_those_after_it(peak: float | None) -> None:
    """The learning rate rises over 20 steps: as published, rounds have the length that comes right after."""
    rule = LocalSGD(every=Quadratic(alpha=16e-3, peak=peak, minimum=2))
    ranks = Replicas(rule)
    lengths = []
    for step in range(60):
        rate = 8e-3 * min(1.0, (step + 1) / 20)
        ranks.together(functools.partial(_step_at, ranks, rate))
        lengths.append(ranks.outers[0].round_length)
    assert max(lengths[:20]) == (2 if peak is None else 4)
    assert set(lengths[24:]) == {4}
    ranks.world.close()


def _step_at(ranks: Replicas, rate: float, rank: int) -> None:
    ranks.outers[rank].after_step(rate)
