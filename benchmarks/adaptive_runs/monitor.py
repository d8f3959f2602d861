"""What an observed step costs beside an unobserved one, in turn within one run. Started by torchrun."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

import lowbit_strategy  # noqa: F401  registers the strategies' names
from lowbit_strategy.lightning import CompressionMonitor
from recipes.gpt import LanguageModel
from recipes.text import Windows, standard_library

WARMUP_STEPS = 6
DEFAULT_INTERVAL = 50


class Meter(L.Callback):
    """Seconds of each step, after the monitor has written what it saw."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.times_s.append(time.perf_counter() - self._started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--strategy", default="loco_ddp")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    meter = Meter()
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=2,
        max_steps=options.steps,
        callbacks=[CompressionMonitor(every_n_steps=2), meter],
        logger=CSVLogger(options.folder),
        log_every_n_steps=1000,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LanguageModel(width=128, depth=4, heads=4, context=128)
    trainer.fit(model, DataLoader(Windows(standard_library("train"), 128), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        watched, plain = (statistics.median(meter.times_s[WARMUP_STEPS + at :: 2]) for at in (0, 1))
        share = (watched - plain) / (DEFAULT_INTERVAL * plain)
        figures = {"strategy": options.strategy, "step_s": plain, "observed_step_s": watched, "share": share}
        options.report.write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
