"""A study of gradient compression for language models, after arXiv 2502.07634, repeated on real text.

Trains the same small GPT with top-k, random-k, DGC and ExDyna at 50, 500 and 5000 times fewer elements, with QSGD and
LoCo at 8, 4 and 2 bits, and uncompressed, on 1, 2 and 4 workers, and writes

* ``study.csv``, per run: perplexity on held-out text, milliseconds of computation, of the compressor's own work
  and of communication (medians over steps of rank 0), bytes sent per rank and step and the time these take at 1 Gbit/s
* ``study.png``: perplexity and times over the ratio, means of the seeds

Every step each rank computes its gradient, all ranks meet, and the gradient is reduced as one bucket: what waits for
bytes is communication, the rest of the reduction is the compressor's work. Nothing overlaps, so that the parts are
seen apart; ranks beyond the number of cores take turns, which shows in the times.

    python recipes/compression_study.py --steps 600 --seeds 2     # some 40 minutes on two idle cores
    python recipes/compression_study.py --quick                   # a minute or two
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import typer
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from lowbit_strategy import DGC, QSGD, Compressor, Dense, ExDyna, LoCo, RandomK, TopK
from lowbit_strategy.collectives.comm import Comm, GroupComm
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks

try:
    from recipes.gpt import GPT
    from recipes.text import Windows, standard_library
except ImportError:  # run as a script: its own folder is on the path
    from gpt import GPT
    from text import Windows, standard_library

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter

RATIOS = (50, 500, 5000)
BITS = (8, 4, 2)
BATCH, CONTEXT, WIDTH, DEPTH, HEADS = 8, 64, 96, 2, 4
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20
VALIDATION_WINDOWS = 256


@dataclass(frozen=True)
class Run:
    """One line of the result."""

    method: str
    ratio: float
    workers: int
    seed: int
    perplexity: float
    compute_ms: float
    compressor_ms: float
    communication_ms: float
    sent_bytes: int
    ms_at_1_gbit: float


def methods(quick: bool) -> dict[tuple[str, float], Compressor]:
    """By name and ratio: of elements for sparse methods, of bits for the others."""
    chosen: dict[tuple[str, float], Compressor] = {("dense", 1): Dense()}
    for ratio in RATIOS[:1] if quick else RATIOS:
        for name, kind in {"top-k": TopK, "random-k": RandomK, "DGC": DGC, "ExDyna": ExDyna}.items():
            chosen[name, ratio] = kind(density=1 / ratio)
    for bits in (4,) if quick else BITS:
        chosen["QSGD", 32 / bits] = QSGD(bits=bits, high_precision_bits=bits)
        chosen["LoCo", 32 / bits] = LoCo(bits=bits, high_precision_bits=bits)
    return chosen


class Worker:
    """One rank's model and data, the same start for every method."""

    def __init__(self, compressor: Compressor, comm: Comm, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.model = GPT(WIDTH, DEPTH, HEADS, CONTEXT)
        self.steps = steps
        self.comm = comm
        self.parameters = list(self.model.parameters())
        specs = describe_parameters(self.model)
        self.sync = GradientSync(compressor, specs, Ranks.flat(comm), torch.device("cpu"), sharded=False, seed=1)
        entries, at = [], 0
        for spec in specs:
            entries.append((spec.name, at))
            at += spec.numel
        self.layout = BucketLayout(tuple(entries))
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.seconds: dict[str, list[float]] = {"compute": [], "compressor": [], "communication": []}

    def train(self) -> None:
        batches = self._batches()
        for step in range(self.steps):
            start = time.perf_counter()
            self._gradient(next(batches))
            bucket = torch.cat([p.grad.view(-1) for p in self.parameters if p.grad is not None])
            forward_and_backward = time.perf_counter() - start
            dist.barrier()
            self._reduce(bucket)
            start = time.perf_counter()
            self._update(bucket, step)
            self.seconds["compute"].append(forward_and_backward + time.perf_counter() - start)

    def _batches(self) -> Iterator[Tensor]:
        text = standard_library("train")
        generator = torch.Generator().manual_seed(1000 * self.seed + self.comm.rank)
        while True:
            starts = torch.randint(text.numel() - CONTEXT - 1, (BATCH,), generator=generator)
            yield torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()

    def _gradient(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad()
        self._loss(tokens[:, :-1], tokens[:, 1:]).backward()

    def _loss(self, tokens: Tensor, following: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten())

    def _reduce(self, bucket: Tensor) -> None:
        start, waiting = time.perf_counter(), 0.0
        self.sync.begin_step()
        for pending in self.sync.reduce(self.layout, bucket, bucket):
            if pending is not None:
                before = time.perf_counter()
                pending.wait()
                waiting += time.perf_counter() - before
        self.seconds["communication"].append(waiting)
        self.seconds["compressor"].append(time.perf_counter() - start - waiting)
        self.sync.end_step()

    def _update(self, bucket: Tensor, step: int) -> None:
        for parameter, mean in zip(self.parameters, bucket.split([p.numel() for p in self.parameters]), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(mean.view_as(parameter))
        progress = max(0.0, (step - WARMUP_STEPS) / max(1, self.steps - WARMUP_STEPS))
        factor = min(1.0, (step + 1) / WARMUP_STEPS) * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
        self.optimizer.param_groups[0]["lr"] = LEARNING_RATE * factor
        self.optimizer.step()

    @torch.no_grad()
    def perplexity(self) -> float:
        windows = Windows(standard_library("validation"), CONTEXT, VALIDATION_WINDOWS)
        losses = []
        for first in range(0, len(windows), 32):
            pairs = [windows[i] for i in range(first, min(first + 32, len(windows)))]
            losses.append(float(self._loss(torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs]))))
        return math.exp(sum(losses) / len(losses))


def work(rank: int, workers: int, store: str, steps: int, seed: int, quick: bool, queue: Any) -> None:
    """One process: all methods one after the other; rank 0 reports."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    for (name, ratio), compressor in methods(quick).items():
        comm = GroupComm(dist.new_group())
        worker = Worker(compressor, comm, steps, seed)
        worker.train()
        if rank == 0:
            ms = {part: statistics.median(seconds) * 1e3 for part, seconds in worker.seconds.items()}
            sent = comm.sent_nbytes // steps
            queue.put(
                Run(
                    name,
                    ratio,
                    workers,
                    seed,
                    worker.perplexity(),
                    ms["compute"],
                    ms["compressor"],
                    ms["communication"],
                    sent,
                    sent * 8e-6,
                )
            )
        dist.barrier()
    dist.destroy_process_group()


def study(workers: int, steps: int, seed: int, quick: bool, console: Console) -> list[Run]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    os.environ["OMP_NUM_THREADS"] = "1"
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = (workers, f"{folder}/store", steps, seed, quick, queue)
        processes = multiprocessing.start_processes(work, arguments, nprocs=workers, join=False, start_method="spawn")
        while len(runs) < len(methods(quick)):
            if queue.empty():
                if processes.join(timeout=0.5) and queue.empty():
                    break
                continue
            run = queue.get()
            runs.append(run)
            console.print(
                f"seed {seed}, {workers} workers, {run.method} {run.ratio:g}x: perplexity {run.perplexity:.3f}, "
                f"compressor {run.compressor_ms:.1f} ms, {run.sent_bytes:,} bytes per step"
            )
        while not processes.join():
            pass
    return runs


def plot(runs: list[Run], path: Path) -> None:
    """Perplexity above, the times of a step below; one column per number of workers."""
    columns = sorted({run.workers for run in runs})
    figure, axes = plt.subplots(
        2, len(columns), figsize=(5 * len(columns), 8), squeeze=False, layout="constrained", sharex=True, sharey="row"
    )
    names = [name for name in dict.fromkeys(run.method for run in runs) if name != "dense"]
    for column, workers in enumerate(columns):
        here = [run for run in runs if run.workers == workers]
        upper, lower = axes[0][column], axes[1][column]
        upper.axhline(mean(here, "dense", 1).perplexity, color="black", linestyle="--", label="uncompressed")
        for name in names:
            ratios = sorted({run.ratio for run in here if run.method == name})
            line = [mean(here, name, ratio) for ratio in ratios]
            upper.plot(ratios, [run.perplexity for run in line], marker="o", label=name)
            lower.plot(ratios, [run.compressor_ms for run in line], marker="o", label=name)
        lower.axhline(mean(here, "dense", 1).compute_ms, color="black", linestyle="--", label="computation")
        upper.set(xscale="log", yscale="log", title=f"{workers} worker{'s' if workers > 1 else ''}")
        lower.set(xscale="log", yscale="log", xlabel="times fewer elements or bits")
        for panel in (upper, lower):
            panel.grid(alpha=0.3, which="both")
            panel.set_xticks([32 / bits for bits in BITS] + list(RATIOS))
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter("{x:g}")
                axis.set_minor_formatter(NullFormatter())
    axes[0][0].set_ylabel("perplexity per byte")
    axes[1][0].set_ylabel("compressor's own work, ms per step")
    axes[0][0].legend(fontsize=9)
    axes[1][0].legend(fontsize=9)
    figure.savefig(path, dpi=120)


def mean(runs: list[Run], method: str, ratio: float) -> Run:
    """One run in place of those of all seeds."""
    same = [run for run in runs if run.method == method and run.ratio == ratio]
    measured = ("perplexity", "compute_ms", "compressor_ms", "communication_ms")
    return replace(same[0], **{name: statistics.mean(getattr(run, name) for run in same) for name in measured})


def main(
    quick: Annotated[bool, typer.Option(help="Few methods, few steps: to see that it works.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each run.")] = None,
    seeds: Annotated[int, typer.Option(help="Of model and data: 0 ... n - 1.", min=1)] = 1,
    folder: Annotated[Path, typer.Option(help="Where study.csv and study.png go.")] = Path("study"),
) -> None:
    """Perplexity, communication time and compute time of compression methods."""
    console = Console()
    runs: list[Run] = []
    for seed in range(seeds):
        for workers in (1, 2) if quick else (1, 2, 4):
            runs += study(workers, steps or (40 if quick else 300), seed, quick, console)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "study.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(asdict(runs[0])))
        writer.writeheader()
        writer.writerows(asdict(run) for run in runs)
    plot(runs, folder / "study.png")
    console.print(f"{folder / 'study.csv'} and {folder / 'study.png'} are written.")


if __name__ == "__main__":
    typer.run(main)
