"""Every method in the demo's own training: two processes, Lightning, DDP or FSDP2, loss against the uncompressed run.

    python -m benchmarks.methods --strategy loco2_fsdp --strategy loco1_ddp --seeds 3 --json methods.json
    python -m benchmarks.methods --strategy 'loco_fsdp {"bits": 3, "codebook": "fitted"}' --json methods.json
    python -m benchmarks.methods --every --steps 150 --json methods.json

Each run is `recipes/demo_train.py`, about two minutes for its default of 600 steps on two idle cores; one pair of
processes trains with all strategies of a seed in turn. Gaps are to the uncompressed run of the same seed and layout,
which is added by itself. Runs are written to the JSON file as they end, and what is there already is not run again:
remove runs of a preset whose settings have changed since.
`benchmarks/quality.py` is for trying settings: any number of simulated ranks in one process, its own schedule.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from rich.console import Console

from benchmarks.runs import ResultsFile, SeedCount, table_of
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all
from lowbit_strategy.methods.registry import PRESETS, from_options
from lowbit_strategy.model.parameters import describe_parameters
from recipes.gpt import GPT

Layout = Literal["ddp", "fsdp"]
LAYOUTS: tuple[Layout, ...] = ("ddp", "fsdp")
WORLD_SIZE = 2
AVERAGED_STEPS = 50
WARMUP_STEPS = 10  # not timed


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training run, as rank 0 saw it.

    Args:
        first_loss: Training loss of the first step.
        train_loss: Mean training loss of the last steps.
        step_ms: Median step.
        sent_nbytes: By a rank in a step, everything included.
        codec_bits: Bits per element and hop of what is neither exempt nor at high precision, scales and positions
            included, at the end of the run.
    """

    strategy: str
    steps: int
    seed: int
    first_loss: float
    train_loss: float
    validation_loss: float
    step_ms: float
    sent_nbytes: float
    codec_bits: float

    @property
    def layout(self) -> str:
        return layout_of(self.strategy)


def layout_of(strategy: str) -> str:
    return strategy.partition(" ")[0].rpartition("_")[2]


def parse_strategy(strategy: str) -> tuple[Compressor, Layout]:
    """``loco2_fsdp``, or ``loco_ddp {"bits": 2}``: JSON options after the name.

    Raises:
        ValueError: No such name, layout or option.
    """
    full, _, options = strategy.partition(" ")
    name, _, layout = full.rpartition("_")
    if layout not in LAYOUTS:
        raise ValueError(f"a strategy ends in _ddp or _fsdp, got {full!r}")
    return from_options(name, json.loads(options) if options else {}), layout


def codec_bits(compressor: Compressor, layout: Layout, step_index: int) -> float:
    """In one step, by the methods' own accounting."""
    hops = (2 if layout == "ddp" else 1) * (WORLD_SIZE - 1) / WORLD_SIZE
    model = GPT(128, 4, 4, 128)
    specs = {spec.name: replace(spec, sharded=layout == "fsdp") for spec in describe_parameters(model)}
    assigned = assign_all(compressor.phase(step_index), list(specs.values()))
    bits, numel = 0.0, 0
    for name, assignment in assigned.items():
        if assignment.kind == "compressed":
            bits += 8 * _nbytes_a_hop(assignment, specs[name], hops)
            numel += specs[name].numel
    return bits / numel if numel else 32.0


def mean_codec_bits(run: Run) -> float:
    """Over all steps, with what is at high precision at the start."""
    compressor, layout = parse_strategy(run.strategy)
    first_steps: dict[Compressor, int] = {}
    for step in range(run.steps):
        first_steps.setdefault(compressor.phase(step), step)
    starts = [*first_steps.values(), run.steps]
    bits = [codec_bits(compressor, layout, step) * (end - step) for step, end in itertools.pairwise(starts)]
    return sum(bits) / run.steps


def _nbytes_a_hop(assignment: Assignment, spec: TensorSpec, hops: float) -> float:
    method = assignment.method
    if isinstance(method, CodecPair):
        return statistics.mean(codec.wire_nbytes(spec.numel) for codec in method.hops(spec))
    return method.wire_nbytes(spec, WORLD_SIZE) / hops


def train(strategies: Sequence[str], steps: int, seed: int) -> Iterator[Run]:
    """The demo's script on two processes, which train with one strategy after the other.

    Raises:
        RuntimeError: They failed; the message has the end of what they printed.
    """
    script = Path(__file__).with_name("method_run.py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(script), "--steps", str(steps), "--seed", str(seed), "--folder", name]
        for strategy in strategies:
            command += ["--strategy", strategy]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | dict(os.environ)
        with Path(folder, "output").open("w+") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                for i, strategy in enumerate(strategies):
                    _wait_for(folder / f"{i}.json", process, output)
                    yield summary(json.loads(Path(folder, f"{i}.json").read_text()), strategy, seed)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Lightning notes a SIGTERM and trains on
                process.wait()


def _wait_for(record: Path, process: subprocess.Popen[bytes], output: TextIO) -> None:
    while not record.exists():
        ended = process.poll() is not None
        if ended and not record.exists():
            output.seek(0)
            raise RuntimeError(f"training ended with status {process.returncode}\n{output.read()[-4000:]}")
        time.sleep(0.5)


def summary(record: Mapping[str, Any], strategy: str, seed: int) -> Run:
    losses = [loss for _, loss in record["train"]]
    return Run(
        strategy=strategy,
        steps=record["steps"],
        seed=seed,
        first_loss=losses[0],
        train_loss=statistics.mean(losses[-AVERAGED_STEPS:]),
        validation_loss=record["validation"][-1][1],
        step_ms=statistics.median(record["step_ms"][WARMUP_STEPS:]),
        sent_nbytes=record["sent_nbytes_per_step"],
        codec_bits=codec_bits(*parse_strategy(strategy), record["steps"] - 1),
    )


class Results:
    """Runs in a JSON file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        saved = json.loads(path.read_text()) if path is not None and path.exists() else []
        self.runs = [Run(**run) for run in saved]

    def get(self, strategy: str, steps: int, seed: int) -> Run | None:
        key = (strategy, steps, seed)
        return next((run for run in self.runs if (run.strategy, run.steps, run.seed) == key), None)

    def add(self, run: Run) -> None:
        self.runs.append(run)
        if self.path is not None:
            self.path.write_text(json.dumps([asdict(run) for run in self.runs], indent=1) + "\n")

    def baseline(self, run: Run) -> Run | None:
        return self.get(f"dense_{run.layout}", run.steps, run.seed)

    def gap(self, run: Run) -> float | None:
        """Of the validation loss, in per cent."""
        dense = self.baseline(run)
        return None if dense is None else 100 * (run.validation_loss / dense.validation_loss - 1)


def show(results: Results, steps: int, console: Console) -> None:
    losses, gaps, bits = ("loss: first", "training", "validation"), ("gap, %", "mean gap, %"), ("bits", "of the run")
    figures = ("seeds", *losses, *gaps, *bits, "kB a step", "step, dense = 1")
    chosen = [run for run in results.runs if run.steps == steps]
    rows = []
    for strategy in sorted({run.strategy for run in chosen}, key=lambda name: (layout_of(name), name)):
        seeds = sorted((run for run in chosen if run.strategy == strategy), key=lambda run: run.seed)
        rows.append((strategy, *_row(seeds, results)))
    console.print(table_of(f"{steps} steps, {WORLD_SIZE} processes", ("strategy",), figures, rows))


def _row(runs: Sequence[Run], results: Results) -> list[str]:
    gaps = [gap for run in runs if (gap := results.gap(run)) is not None]
    times = [run.step_ms / dense.step_ms for run in runs if (dense := results.baseline(run)) is not None]
    return [
        " ".join(str(run.seed) for run in runs),
        f"{statistics.mean(run.first_loss for run in runs):.3f}",
        f"{statistics.mean(run.train_loss for run in runs):.4f}",
        f"{statistics.mean(run.validation_loss for run in runs):.4f}",
        " ".join(f"{gap:+.2f}" for gap in gaps),
        f"{statistics.mean(gaps):+.2f}" if gaps else "",
        f"{runs[0].codec_bits:.2f}",
        f"{mean_codec_bits(runs[0]):.2f}",
        f"{runs[0].sent_nbytes / 1e3:.1f}",
        f"{statistics.median(times):.2f}" if times else "",
    ]


def every_strategy() -> list[str]:
    return [f"{name}_{layout}" for layout in LAYOUTS for name in PRESETS if name != "dense"]


def main(
    strategy: Annotated[list[str] | None, typer.Option(help="a name, or 'name {JSON options}'; repeat")] = None,
    every: Annotated[bool, typer.Option(help="all registered strategies")] = False,
    steps: Annotated[int, typer.Option(help="optimizer steps of a run", min=2 * WARMUP_STEPS)] = 600,
    seeds: SeedCount = 1,
    json_path: ResultsFile = None,
) -> None:
    """Train with each strategy and without compression, then compare."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the training processes end too
    wanted = list(dict.fromkeys([*(strategy or []), *(every_strategy() if every else [])]))
    results, console = Results(json_path), Console(width=160)
    for name in wanted:
        parse_strategy(name)
    for seed in range(seeds):
        names = [*dict.fromkeys(f"dense_{layout_of(name)}" for name in wanted), *wanted]
        missing = [name for name in dict.fromkeys(names) if results.get(name, steps, seed) is None]
        for run in train(missing, steps, seed) if missing else ():
            results.add(run)
            gap = results.gap(run)
            console.print(f"{run.strategy} seed {seed}: validation loss {run.validation_loss:.4f}, {gap:+.2f} %")
    show(results, steps, console)


if __name__ == "__main__":
    typer.run(main)
