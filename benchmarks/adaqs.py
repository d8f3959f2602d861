"""The demo's own training on two processes with AdaQS between 2, 4 and 8 bits, which `docs/adaptive.md` shows.

    python benchmarks/adaqs.py --results benchmarks/results/adaptive_adaqs.json

Lightning starts the second process by the same command line. What rank 0 writes: losses, and at every decision the
moving average of the mean-to-deviation ratio, its reference and the bits in force.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch.distributed as dist
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lowbit_strategy import LoCo
from lowbit_strategy.control import AdaQS
from lowbit_strategy.control.accordion import MODEL
from lowbit_strategy.lightning import AdaptiveCompression
from recipes import demo_train

LADDER = (LoCo(bits=8), LoCo(bits=4), LoCo(bits=2, codebook="fitted", block_size=64))
BITS = (8, 4, 2)
MATRIX = "gpt.blocks.0.qkv.weight"  # the controller judges the model as a whole, so any matrix has the model's level


class Decisions(L.Callback):
    """What the controller has seen and chosen, whenever a ratio has been taken."""

    def __init__(self, adaptive: AdaptiveCompression) -> None:
        self.adaptive = adaptive
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        driver = self.adaptive.driver
        assert driver is not None
        state = driver.state
        if MODEL not in state["ratios"]:
            return
        row = {"ratio": state["ratios"][MODEL], "reference": state["references"][MODEL]}
        row["bits"] = BITS[state["levels"][MATRIX]]
        if not self.rows or row != {key: self.rows[-1][key] for key in row}:
            self.rows.append({"step": trainer.global_step - 1, **row})  # decided before this step's gradients


def main(
    results: Annotated[Path, typer.Option(help="where rank 0 writes its record")],
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 400,
    interval: Annotated[int, typer.Option(help="steps over which a ratio is taken")] = 10,
    factor: Annotated[float, typer.Option(help="fall of the ratio that costs one level")] = 0.5,
    seed: Annotated[int, typer.Option(help="of the model and the data order")] = 0,
) -> None:
    controller = AdaQS(ladder=LADDER, factor=factor, interval=interval)
    adaptive = AdaptiveCompression(controller, record=False)
    decisions = Decisions(adaptive)
    demo_train.train(strategy="loco_ddp", steps=steps, seed=seed, results=results, callbacks=[adaptive, decisions])
    if dist.get_rank() == 0:
        report = json.loads(results.read_text())
        settings = {key: getattr(controller, key) for key in ("factor", "interval", "ewma")}
        kept = {key: report[key] for key in ("steps", "train", "validation", "sent_nbytes_per_step", "num_parameters")}
        results.write_text(json.dumps({"settings": settings, **kept, "decisions": decisions.rows}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
