"""One training run of the demo, as a user would write it: only the strategy's name decides whether it is compressed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
import torch.distributed as dist
import typer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

if __package__:
    from recipes.gpt import LanguageModel
    from recipes.text import Windows, standard_library
else:
    from gpt import LanguageModel
    from text import Windows, standard_library

CONTEXT = 128


class Record(L.Callback):
    """Losses, step times and bytes of this rank, for the table and the plot."""

    def __init__(self) -> None:
        self.train: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.step_ms: list[float] = []
        self._started = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._started = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.step_ms.append((time.perf_counter() - self._started) * 1e3)
        self.train.append((trainer.global_step, outputs["loss"].item()))

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.validation.append((trainer.global_step, trainer.callback_metrics["val_loss"].item()))


def train(
    *,
    strategy: str,
    steps: int,
    seed: int,
    devices: int = 2,
    results: Path | None = None,
    callbacks: Sequence[L.Callback] = (),
    validations: int = 8,
) -> None:
    """Train a small GPT on the source of Python's standard library; rank 0 writes its record as JSON."""
    torch.set_num_threads(1)
    L.seed_everything(seed)
    text = Windows(standard_library("train"), CONTEXT)
    validation = Windows(standard_library("validation"), CONTEXT, limit=256)
    record = Record()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        limit_train_batches=steps,
        val_check_interval=max(steps // validations, 1),
        callbacks=[record, RichProgressBar(), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = LanguageModel(width=128, depth=4, heads=4, context=CONTEXT, learning_rate=1e-3)
    trainer.fit(
        model,
        DataLoader(text, batch_size=8, shuffle=True),
        DataLoader(validation, batch_size=32),
    )
    if results is not None and trainer.is_global_zero:
        numel = sum(parameter.numel() for parameter in model.parameters())
        report = {
            "strategy": strategy,
            "steps": steps,
            "train": record.train,
            "validation": record.validation,
            "step_ms": record.step_ms,
            "sent_nbytes_per_step": _sent_nbytes(trainer.strategy, numel, devices) / trainer.global_step,
            "num_parameters": numel,
        }
        results.write_text(json.dumps(report))


def _sent_nbytes(strategy: Any, numel: int, devices: int) -> float:
    """Bytes of gradients that this rank has sent in the whole run: counted, or those of DDP's ring all-reduce."""
    if (sync := getattr(strategy, "sync", None)) is not None:
        return float(sync.ranks.peers.sent_nbytes)
    if type(strategy) is not DDPStrategy:
        raise ValueError(f"what {type(strategy).__name__} sends is not known: use ddp, or a name of lowbit_strategy")
    return strategy.lightning_module.trainer.global_step * 4 * numel * 2 * (devices - 1) / devices


def main(
    strategy: Annotated[str, typer.Option(help="loco_ddp, loco_fsdp, ddp, ...")] = "loco_ddp",
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the model and the data order.")] = 0,
    devices: Annotated[int, typer.Option(help="Local processes.")] = 2,
    results: Annotated[Path | None, typer.Option(help="Where rank 0 writes its record as JSON.")] = None,
) -> None:
    """Train a small GPT on the source of Python's standard library."""
    train(strategy=strategy, steps=steps, seed=seed, devices=devices, results=results)
    dist.destroy_process_group()  # Lightning leaves it to the script


if __name__ == "__main__":
    typer.run(main)
