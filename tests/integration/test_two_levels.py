"""Two levels of ranks: exact inside a node, compressed between nodes, on four processes that stand for two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.nodes import nodes_of
from tests.scenarios import Facts, scenarios
from tests.training import (
    Kind,
    Regression,
    fingerprint,
    full_parameters,
    listen,
    loader,
    trainer,
)

BOTH: tuple[Kind, ...] = ("ddp", "fsdp")


def by_name(folder: Path, kind: Kind) -> Facts:
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for name in ("ddp", f"dense_{kind}", f"loco_{kind}"):
            torch.manual_seed(0)
            model = Regression()
            with listen() as lines:
                made = trainer(name, max_steps=20)
                made.fit(model, loader())
            runs[name] = {"losses": model.losses, "values": {k: v.tolist() for k, v in full_parameters(model).items()}}
    sync = made.strategy.sync
    return {
        "stock": runs["ddp"],
        "dense": runs[f"dense_{kind}"],
        "losses": runs[f"loco_{kind}"]["losses"],
        "print": fingerprint(model),
        "world": (sync.comm.world_size, sync.everyone.world_size),
        "sent": sync.comm.sent_nbytes,
        "accounted": 20 * sum(sync.sent_nbytes(name) for name in sync.specs),
        "inside": (sync.inside.sent_nbytes, 20 * sync.inside_nbytes),
        "residual": sync.residual_nbytes,
        "numel": sum(spec.numel for spec in sync.wholes.values()),
        "log": lines,
    }


@scenarios(by_name, world_size=4, kind=BOTH)
def test_by_name(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert rank["world"] == (2, 4)
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]
        for name, values in rank["stock"]["values"].items():
            torch.testing.assert_close(torch.tensor(rank["dense"]["values"][name]), torch.tensor(values))
        headers_and_padding = 20 * 2 * 3 * (16 + 6 * 15)
        assert rank["accounted"] < rank["sent"] <= rank["accounted"] + headers_and_padding
        assert rank["inside"][0] == rank["inside"][1] > 0
        assert rank["residual"] < 1.2 * rank["numel"]  # an int8 per element, a half of it, and the downlink's half
    log = "\n".join(facts[0]["log"])
    assert "over 2 groups of 2 ranks, exact inside a group" in log
    assert "between nodes" in log
