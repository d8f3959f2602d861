"""The demo's own training on two processes with Accordion between 8 and 2 bits, for `benchmarks/adaptive.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lowbit_strategy import LoCo
from lowbit_strategy.control import Accordion
from lowbit_strategy.lightning import AdaptiveCompression
from recipes import demo_train

LIGHT, HEAVY = LoCo(bits=8), LoCo(bits=2, codebook="fitted", block_size=64, beta=0.95)  # as loco2, no warm-up


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRun:
    """One run; bytes are a rank's in a step, mean over the run, the controller's own included."""

    method: str
    seed: int
    validation_loss: float
    sent_nbytes: float


def train(name: str, eta: float, seed: int, *, steps: int) -> DemoRun:
    """This file as a script: Lightning starts the second process by the same command line."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = [sys.executable, str(Path(__file__)), "--eta", str(eta), "--steps", str(steps), "--seed", str(seed)]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | dict(os.environ)
        subprocess.run([*command, "--results", str(record)], check=True, env=environment, stdout=subprocess.DEVNULL)
        report = json.loads(record.read_text())
    validation_loss = report["validation"][-1][1]
    return DemoRun(method=name, seed=seed, validation_loss=validation_loss, sent_nbytes=report["sent_nbytes_per_step"])


def main(
    results: Annotated[Path, typer.Option(help="where rank 0 writes its record")],
    strategy: Annotated[str, typer.Option(help="loco_fsdp or loco_ddp; Accordion chooses the bits")] = "loco_fsdp",
    eta: Annotated[float, typer.Option(help="Accordion's")] = 0.5,
    interval: Annotated[int, typer.Option(help="likewise, in steps")] = 20,
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 600,
    seed: Annotated[int, typer.Option(help="of the model and the data order")] = 0,
) -> None:
    controller = Accordion(light=LIGHT, heavy=HEAVY, eta=eta, interval=interval, unit="steps")
    adaptive = AdaptiveCompression(controller, record=False)
    demo_train.train(strategy=strategy, steps=steps, seed=seed, results=results, callbacks=[adaptive])
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
