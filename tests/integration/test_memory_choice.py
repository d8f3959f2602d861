"""`memory=` under real strategies: the same choice on all ranks, told in the log, and a training that learns."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lowbit_strategy import LoCo
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from tests.scenarios import Facts, raised, scenarios
from tests.training import WIDTH, Regression, fingerprint, listen, loader, trainer

HIDDEN = 256


def wide() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 8)
    )


def limited(folder: Path) -> Facts:
    numel = sum(param.numel() for param in wide().parameters())
    facts: Facts = {"numel": numel}
    for memory in (None, 2.5, 1.8, 1.3):  # bytes per parameter
        torch.manual_seed(0)
        model = Regression(wide())
        strategy = LowBitFSDPStrategy(LoCo(), memory=None if memory is None else memory * numel / 1e9)
        with listen() as lines:
            made = trainer(strategy, max_steps=24)
            made.fit(model, loader())
        sync = made.strategy.sync
        facts[memory] = {
            "losses": model.losses,
            "print": fingerprint(model),
            "residual": sync.state.nbytes / numel,
            "kept": sync.plan().memory.weights / numel,
            "log": [line for line in lines if "to fit into" in line],
        }
    small = LowBitDDPStrategy(LoCo(), memory=1e-6)
    facts["error"] = raised(lambda: trainer(small, max_steps=1).fit(Regression(wide()), loader()))
    return facts


@scenarios(limited)
def test_less_is_kept_and_the_loss_stays(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank[None]["residual"] > 0.9
        assert rank[None]["kept"] > 0.9
        assert rank[None]["log"] == []
        assert rank[2.5]["kept"] == 0
        assert rank[2.5]["residual"] > 0.9
        assert 0.4 < rank[1.8]["residual"] < 0.6
        assert rank[1.3]["residual"] == 0
        for memory in (None, 2.5, 1.8, 1.3):
            assert rank[memory]["print"] == facts[0][memory]["print"]
            assert sum(rank[memory]["losses"][-6:]) < 1.1 * sum(rank[None]["losses"][-6:])
        assert rank[2.5]["print"] == rank[None]["print"]  # gathered again: the same bits
        assert "compression would keep" in rank["error"]
    assert "gathered again" in facts[0][2.5]["log"][0]
    assert "4 bits instead of 8" in facts[0][1.8]["log"][0]
