"""Far links: other messages, the same bits. What is slow there is measured in ``benchmarks/network.py --delay``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lowbit_strategy import LoCo, TopK
from lowbit_strategy.collectives.far_comm import FarComm
from tests.scenarios import Facts, scenarios
from tests.training import Kind, Regression, checksum, fingerprint, loader, strategy, trainer

METHODS: dict[str, Any] = {"loco": LoCo(block_size=32), "topk": TopK(density=0.1)}


def both(folder: Path, kind: Kind, method: str) -> Facts:
    runs = []
    for far in (False, True):
        torch.manual_seed(0)
        model = Regression()
        made = trainer(strategy(kind, METHODS[method], far_links=far), max_steps=8)
        made.fit(model, loader())
        sync = made.strategy.sync
        runs.append(
            {
                "far": isinstance(sync.ranks.peers, FarComm),
                "losses": model.losses,
                "print": fingerprint(model),
                "residuals": [checksum([r]) for n in sync.specs if (r := sync.state.residual(n)) is not None],
                "sent": sync.ranks.peers.sent_nbytes,
                "weights": None if sync.weights is None else sync.weights.comm.sent_nbytes,
            }
        )
    return {"near": runs[0], "far": runs[1]}


@scenarios(both, kind=("ddp", "fsdp", "hsdp"), method=("loco",))
def test_the_same_bits_and_bytes(facts: list[Facts]) -> None:
    for rank in facts:
        assert not rank["near"].pop("far")
        assert rank["far"].pop("far")
        assert rank["near"]["residuals"]
        assert rank["near"] == rank["far"]
