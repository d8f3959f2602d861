"""Methods that look at the whole model wait for every bucket of the step, whatever order the buckets come in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lowbit_strategy import DGC, ExDyna, MiCRO
from lowbit_strategy.lightning import LowBitDDPStrategy
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import fingerprint
from testing.training.regression import WIDTH, Regression, loader, trainer

COMPRESSORS = {
    "micro": MiCRO(exempt=("@vector",)),
    "exdyna": ExDyna(exempt=("@vector",)),
    "dgc": DGC(clip_norm=1.0, exempt=("@vector",)),
}


class PlainSGD(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def trained(folder: Path, name: str) -> Facts:
    """The last bucket holds the first layer alone: no exempt tensor, so it needs one exchange fewer than the others."""
    net = nn.Sequential(
        nn.Linear(WIDTH, 64, bias=False), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8)
    )
    model = PlainSGD(net)
    trainer(LowBitDDPStrategy(COMPRESSORS[name], bucket_cap_mb=0.005), max_steps=4).fit(model, loader())
    return {"print": fingerprint(model)}


@scenarios(trained, name=tuple(COMPRESSORS))
def test_ranks_stay_identical(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
