"""What a step costs beside the kernels: observed steps, many exempt parameters, a bucket on a free link.

    python -m benchmarks.step_costs
    python -m benchmarks.step_costs --other ../earlier      # in turns with another tree, the second row of each pair

Two gloo ranks with one thread each on one machine. Figures are lower quartiles over steps, of rank 0, in milliseconds
of processor time of the whole process.

* observed: DDP, one matrix of a million elements; a plain step's reduction, an observed one's, and their ratio
* exempt: FSDP2, 1,000 parameters of 992 elements that all are exempt; a step, stock's, and their ratio
* bucket: DDP, one matrix of a million elements, forward and backward; a step, stock's, and their ratio
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.custom_loop import compress, monitor
from testing.processes.ranks import run_ranks

STEPS, WARM_STEPS = 60, 6
_WIDTH = 1024
_KINDS = ("observed", "exempt", "bucket")


class ManyVectors(nn.Module):
    """Vectors that are all exempt, added to the input one after the other."""

    def __init__(self, num: int = 1000, numel: int = 992) -> None:
        super().__init__()
        self.vectors = nn.ParameterList([nn.Parameter(torch.randn(numel)) for _ in range(num)])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([*self.vectors]).sum(0)


def quartile(values: Sequence[float]) -> float:
    """The lower one: other programs only add."""
    return statistics.quantiles(values)[0]


def _milliseconds(step: Callable[[], object]) -> list[float]:
    found = []
    for _ in range(WARM_STEPS + STEPS):
        before = time.process_time()
        step()
        found.append(1000 * (time.process_time() - before))
    return found[WARM_STEPS:]


def _trainer(model: nn.Module, x: Tensor, name: str | None, observed: bool = False) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if name is not None:
        session = compress(model, optimizer, name)
        if observed:
            monitor(session.sync, lambda metrics, step: None, every_n_steps=2)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(rank: int, world_size: int, kind: str, name: str) -> tuple[float, float]:
    """The step that is asked about and what it is compared with."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if kind == "exempt":
        models: list[nn.Module] = [ManyVectors(), ManyVectors()]
        for each in models:
            fully_shard(each)
        x = torch.randn(4, 992)
    else:
        models = [DistributedDataParallel(nn.Linear(_WIDTH, _WIDTH, bias=False)) for _ in range(2)]
        x = torch.randn(1, _WIDTH)
    if kind == "observed":
        times = _milliseconds(_trainer(models[0], x, name, observed=True))
        watched, plain = times[0::2], times[1::2]
    else:
        watched = _milliseconds(_trainer(models[0], x, name))
        plain = _milliseconds(_trainer(models[1], x, None))
    return quartile(watched), quartile(plain)


def main(
    kinds: Annotated[str, typer.Option(help="which rows, separated by commas")] = ",".join(_KINDS),
    methods: Annotated[str, typer.Option(help="strategies' compressors")] = "loco,topk",
    other: Annotated[Path | None, typer.Option(help="root of another tree, measured in turns")] = None,
    rounds: Annotated[int, typer.Option(help="how often each row is measured")] = 3,
) -> None:
    """Print a row per kind, compressor and tree."""
    for kind in kinds.split(","):
        for name in methods.split(","):
            for _ in range(rounds):
                for tree in (Path.cwd(), *([] if other is None else [other.resolve()])):
                    environment = os.environ | {"PYTHONPATH": str(tree)}
                    command = [sys.executable, __file__, "--once", kind, name]
                    subprocess.run(command, env=environment, cwd=tree, stderr=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        kind, name = sys.argv[2:4]
        asked, compared = run_ranks(measure, 2, kind, name, timeout=300)[0]
        tree = Path.cwd().name
        print(f"{kind:9} {name:10} {tree:12} {asked:8.2f} {compared:8.2f} {asked / compared:6.2f}", flush=True)
    else:
        typer.run(main)
