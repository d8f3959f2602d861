"""One replica of the demo of machines that come and go, as a user would write it; `demo_elastic.py` starts four."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
import typer
from torch.utils.data import DataLoader

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.lightning import LowBitDDPStrategy

if __package__:
    from recipes.gpt import LanguageModel
    from recipes.text import Windows, standard_library
else:
    from gpt import LanguageModel
    from text import Windows, standard_library

CONTEXT = 128


class Record(L.Callback):
    """A line per step: when, which step, the loss, and who took part in the last round."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        replica = trainer.strategy.session.replica  # type: ignore[attr-defined]
        line = {"time": time.time(), "step": trainer.global_step, "loss": outputs["loss"].item()}
        print(json.dumps(line | {"members": replica.members}), file=self.file)


class SamePace(L.Callback):
    """At least so many seconds per step: processes that share a machine would not slow each other down elsewhere."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.next = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(max(0.0, self.next - time.monotonic()))
        self.next = time.monotonic() + self.seconds


def main(
    lighthouse: Annotated[str, typer.Option(help="Address of lowbit lighthouse.")],
    name: Annotated[str, typer.Option(help="Of this replica.")],
    folder: Annotated[Path, typer.Option(help="Where its record goes.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps of the run.")] = 400,
    every: Annotated[int, typer.Option(help="Steps of a round.")] = 20,
    replicas: Annotated[int, typer.Option(help="How many begin together.")] = 4,
    pace: Annotated[float, typer.Option(help="Seconds of a step, at least.")] = 0.2,
) -> None:
    """Train a small GPT on the source of Python's standard library, with whoever is there."""
    torch.set_num_threads(1)
    L.seed_everything(0)  # samples differ by the place among the replicas
    folder.mkdir(parents=True, exist_ok=True)
    strategy = LowBitDDPStrategy(
        LoCo(),
        outer=DiLoCo(every=every),
        elastic=Elastic(lighthouse=lighthouse, name=name, min_replicas=min(2, replicas), timeout=6.0),
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[Record(folder / f"{name}.jsonl"), SamePace(pace)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    model = LanguageModel(width=128, depth=4, heads=4, context=CONTEXT, learning_rate=1e-3)
    trainer.fit(model, DataLoader(Windows(standard_library("train"), CONTEXT), batch_size=8, shuffle=True))


if __name__ == "__main__":
    typer.run(main)
