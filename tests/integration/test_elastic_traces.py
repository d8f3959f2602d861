"""What a Trainer does beside training leaves no trace among replicas that come and go, and needs no other replica."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.lightning import CompressionMonitor, LowBitDDPStrategy, LowBitFSDPStrategy
from testing.processes.replicas import Replicas, ranks_of
from testing.training.comparing import fingerprint
from testing.training.regression import MIN_SHARD_NUMEL, Regression, dataset, loader, trainer

STEPS = 22
RULE = DiLoCo(every=5, momentum=0.5)


class Validated(Regression):
    """Its data depends on the step and the replica."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place = place

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        at = (4 * self.global_step + self.place) * 4 % 96
        return super().training_step(dataset()[at : at + 4], batch_idx)


def fit(elastic: Elastic, place: int, num_ranks: int, folder: Path | None) -> dict[str, Any]:
    """`folder`: validate in the middle of an epoch, save, monitor and be ready to stop early."""
    torch.manual_seed(0)
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None)
    strategy: Any = LowBitDDPStrategy(compressor, outer=RULE, elastic=elastic)
    if num_ranks > 1:
        strategy = LowBitFSDPStrategy(
            compressor, outer=RULE, elastic=elastic, shard_size="node", min_shard_numel=MIN_SHARD_NUMEL
        )
    model = Validated(place + int(os.environ.get("RANK", "0")))
    callbacks: list[Callback] = []
    given: dict[str, Any] = {"max_steps": STEPS, "max_epochs": -1}
    if folder is not None:
        callbacks = [
            ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}"),
            CompressionMonitor(every_n_steps=2),
            EarlyStopping("val_loss", patience=100),
        ]
        given |= {"enable_checkpointing": True, "val_check_interval": 3, "limit_val_batches": 2}
    made = trainer(strategy, callbacks=callbacks, **given)
    made.fit(model, DataLoader(dataset(), batch_size=4), *([loader()] if folder is not None else []))
    return {"print": fingerprint(model), "losses": model.losses, "validated": "val_loss" in made.callback_metrics}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_that_validates_saves_and_monitors_trains_as_if_it_did_not(tmp_path: Path, num_ranks: int) -> None:
    found = []
    for folder in (None, tmp_path / "saved"):
        with Replicas(tmp_path) as run:
            run.start("a", fit, 0, num_ranks, None, num_ranks=num_ranks)
            run.start("b", fit, num_ranks, num_ranks, folder, num_ranks=num_ranks)
            results = run.results(*ranks_of("a", num_ranks), *ranks_of("b", num_ranks))
        assert [each.pop("validated") for each in results.values()] == [
            *num_ranks * [False],
            *num_ranks * [folder is not None],
        ]
        found.append(results)
    assert found[0] == found[1]
