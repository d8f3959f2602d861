"""HSDP: sharded inside a node, compressed between the replicas, on four real processes that stand for two nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lowbit_strategy import LoCo
from lowbit_strategy.lightning import LowBitFSDPStrategy
from tests.scenarios import Facts, scenarios
from tests.training import MIN_SHARD_NUMEL, Regression, fingerprint, full_parameters, loader, trainer


@contextlib.contextmanager
def nodes_of(num_ranks: int) -> Iterator[None]:
    """As a launcher says how many ranks share a node."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_WORLD_SIZE"]
        else:
            os.environ["LOCAL_WORLD_SIZE"] = before


def hsdp(compressor: Any = None, **options: Any) -> LowBitFSDPStrategy:
    compressor = compressor if compressor is not None else LoCo(block_size=32)
    options = {"shard_size": "node", "min_shard_numel": MIN_SHARD_NUMEL} | options
    return LowBitFSDPStrategy(compressor, **options)


def by_name(folder: Path) -> Facts:
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for name in ("ddp", "dense_hsdp", "loco_hsdp"):
            torch.manual_seed(0)
            model = Regression()
            made = trainer(name, max_steps=20)
            made.fit(model, loader())
            runs[name] = {"losses": model.losses, "values": {k: v.tolist() for k, v in full_parameters(model).items()}}
    sync = made.strategy.sync
    return {
        **runs,
        "print": fingerprint(model),
        "world": (sync.comm.world_size, sync.everyone.world_size),
        "sent": sync.comm.sent_nbytes,
        "accounted": 20 * sum(sync.sent_nbytes(name) for name in sync.specs),
        "numel": sum(spec.numel for spec in sync.specs.values()),
        "steps": sync.step_index,
        "batches": len(made.train_dataloader),
    }


@scenarios(by_name, world_size=4)
def test_by_name(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert rank["world"] == (2, 4)
        assert rank["steps"] == 20
        assert rank["batches"] == 6  # of 24: every rank has its own
        assert rank["loco_hsdp"]["losses"][-1] < 0.8 * rank["loco_hsdp"]["losses"][0]
        for name, values in rank["ddp"]["values"].items():
            torch.testing.assert_close(torch.tensor(rank["dense_hsdp"]["values"][name]), torch.tensor(values))
        headers_and_padding = 20 * 2 * 3 * (16 + 6 * 15)
        assert rank["accounted"] < rank["sent"] <= rank["accounted"] + headers_and_padding
    assert sum(rank["numel"] for rank in facts) == 2 * sum(torch.tensor(v).numel() for v in facts[0]["ddp"]["values"].values())
