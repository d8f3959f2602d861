"""Runs of the demo's training for `benchmarks/methods.py`, one after another: strategies by name, or with options.

    python benchmarks/method_run.py --strategy 'loco_ddp {"bits": 2, "codebook": "fitted"}' --steps 600 --folder records

Lightning starts the other process with the same command line, so both ranks register the same strategies.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from lightning.pytorch.strategies import StrategyRegistry

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.methods import parse_strategy
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from recipes import demo_train


def register(strategy: str, name: str) -> str:
    """The name that a Trainer takes; `name` where there are options."""
    if " " not in strategy:
        return strategy
    compressor, layout = parse_strategy(strategy)
    build = LowBitDDPStrategy if layout == "ddp" else LowBitFSDPStrategy
    StrategyRegistry.register(name, build, description=strategy, compressor=compressor)
    return name


def main(
    strategy: Annotated[list[str], typer.Option(help="a strategy's name, or 'name {JSON options}'; repeat")],
    folder: Annotated[Path, typer.Option(help="where rank 0 writes the records, 0.json for the first strategy")],
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 600,
    seed: Annotated[int, typer.Option(help="of the model and the data order")] = 0,
) -> None:
    for i, full_name in enumerate(strategy):
        unfinished = folder / f"{i}.unfinished"
        name = register(full_name, f"variant{i}")
        demo_train.train(strategy=name, steps=steps, seed=seed, validations=1, results=unfinished)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            unfinished.rename(folder / f"{i}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
