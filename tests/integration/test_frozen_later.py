"""A layer that is frozen in mid-run under DDP, which waits for the gradients of all that it has wrapped."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_strategy import LoCo, PostLocalSGD
from lowbit_strategy.lightning import LowBitDDPStrategy
from testing.log import listen
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import fingerprint
from testing.training.regression import Regression, loader, trainer


class FreezesLater(Regression):
    def __init__(self, at: int, until: int = 100, layer: int = 0) -> None:
        super().__init__()
        self.at, self.until, self.layer = at, until, layer
        self.frozen: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.net[self.layer].requires_grad_(not self.at <= self.global_step < self.until)
        if self.at <= self.global_step < self.until:
            self.frozen.append(self.net[self.layer].weight.detach().clone())


def frozen_later(folder: Path, span: tuple[int, int]) -> Facts:
    """A layer is frozen in mid-run: in the synchronous part or after it; and trained again."""
    model = FreezesLater(*span)
    rule = PostLocalSGD(every=3, synchronous=8)
    with listen() as lines:
        made = trainer(LowBitDDPStrategy(LoCo(block_size=32), outer=rule), max_steps=20)
        made.fit(model, loader())
    return {
        "print": fingerprint(model),
        "changes": sum(not torch.equal(one, next_) for one, next_ in pairwise(model.frozen)),
        "moved": not torch.equal(model.frozen[-1], model.net[0].weight),
        "turns": made.strategy.sync.rounds.num_syncs,
        "lines": [line for line in lines if "more parameters" in line],
    }


@scenarios(frozen_later, span=((4, 6), (4, 100), (10, 100)))
def test_a_layer_that_is_frozen_in_mid_run(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    span = dict(request.node.callspec.params["facts"].arguments)["span"]
    again = span == (4, 6)
    assert facts[0]["print"] == facts[1]["print"]
    for rank in facts:
        assert rank["turns"] == 5  # of 12 steps, and the last one of the run
        assert rank["changes"] == (span[0] == 10)  # the turn of the round in which it was trained last
        assert rank["moved"] == again
    assert len(facts[0]["lines"]) == again
