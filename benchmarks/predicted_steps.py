"""Steps on emulated links, predicted and measured, cell by cell; what the file has already is not run again.

    sudo .venv/bin/python -m benchmarks.predicted_steps --json benchmarks/results/predicted_steps.json --minutes 4

A prediction is made of the links as `lowbit bench` measures them and of one timed step without communication
(`slow_links/predicted_step.py`), which is timed before all others and after them: a cell is not kept where the two
differ by a tenth of its step, because the machine has changed its speed meanwhile. Cells are ordered so that every
layout, rate and delay comes early; `--minutes` ends between two of them. `--show` prints the table of what the file
has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.network import describe_machine
from benchmarks.runs import show as show_table
from benchmarks.runs import table_of
from testing.hosts.namespaces import SlowNetwork, why_not
from testing.hosts.torchrun import run_on_hosts

SCRIPT = Path(__file__).parent / "slow_links" / "predicted_step.py"
RATES = ("none", "1gbit", "200mbit", "50mbit")
DELAYS_MS = (0, 50, 150)
SHAPES = ((4, 1), (2, 2))
LAYOUTS = {
    "ddp": ("loco_ddp", "ddp", "loco1_ddp", "diloco_ddp"),
    "fsdp": ("loco_fsdp", "fsdp2", "fsdp2-bf16", "loco1_fsdp"),
    "hsdp": ("loco_hsdp", "dense_hsdp", "loco1_hsdp", "diloco_hsdp"),
}
MODEL = {"width": 256, "depth": 12, "context": 64, "batch_size": 1, "numel": 9_597_440}
_FAR_MODEL = {**MODEL, "depth": 4}  # for FSDP2, which waits for a round trip several times per module
_TIMEOUT_S = 900
_SAME_SPEED = 0.05  # of a step, by which computing alone may take longer or shorter than its mean, before and after


def runs() -> Iterator[tuple[str, int, tuple[int, int], str]]:
    """Rate, delay, shape and layout of each run; HSDP needs several ranks a host. The harder links come last."""
    every = [
        (rate, delay, shape, layout)
        for delay, rate, shape, layout in itertools.product(DELAYS_MS, RATES, SHAPES, LAYOUTS)
        if layout != "hsdp" or shape[1] > 1
    ]
    near = [each for each in every if each[1] == 0]
    yield from near
    yield from (each for each in every if each not in near)


def name_of(rate: str, delay: int, shape: tuple[int, int], layout: str) -> str:
    return f"{layout} {shape[0]}x{shape[1]} {rate} {delay}ms"


def model_of(delay: int, *, is_ddp: bool) -> dict[str, int]:
    """Sizes of the model that is trained."""
    return MODEL if not delay or is_ddp else _FAR_MODEL


def run(
    rate: str, delay: int, shape: tuple[int, int], variants: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    model = model_of(delay, is_ddp=variants[0] in LAYOUTS["ddp"])
    numbers = {"rounds": 1, "steps": options.steps, "warmup_steps": options.warmup_steps, **model}
    pairs = [part for name, value in numbers.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with SlowNetwork(shape[0], delay_s=delay / 1000, ranks_per_host=shape[1]) as network:
        network.set_rate(None if rate == "none" else rate)
        arguments = [*pairs, "--variants", *variants]
        limits: dict[str, Any] = {"timeout": _TIMEOUT_S, "own_processors": True}
        report: dict[str, Any] = run_on_hosts(network, SCRIPT, arguments, ranks_per_host=shape[1], **limits)[0]
    return report


def kept(cells: dict[str, Any]) -> dict[str, Any]:
    """Those in which the machine was as fast before as after, as far as their steps could tell."""
    found = {}
    for variant, cell in cells.items():
        before, after = cell["alone_s"]
        if abs(before - after) / 2 <= _SAME_SPEED * cell["measured_s"]:
            found[variant] = cell
        else:
            print(f"{variant} not kept: computing took {before:.3g} s before and {after:.3g} s after", file=sys.stderr)
    return found


def show(cells: dict[str, Any]) -> None:
    ratios, rows = [], []
    for name, report in cells.items():
        for variant, cell in report["cells"].items():
            ratios.append(cell["seconds"] / cell["measured_s"])
            bounds = f"{cell['low']:.3f} to {cell['high']:.3f}"
            figures = (f"{cell['measured_s']:.3f}", f"{cell['seconds']:.3f}", bounds, f"{ratios[-1]:.2f}")
            rows.append((name, variant, *figures))
    headings = ("measured, s", "predicted, s", "between", "ratio")
    show_table(table_of("predicted over measured step", ("cell", "set-up"), headings, rows), width=110)
    if ratios:
        inside = sum(
            cell["low"] <= cell["measured_s"] <= cell["high"]
            for run in cells.values()
            for cell in run["cells"].values()
        )
        within = [sum(abs(ratio - 1) <= bound for ratio in ratios) for bound in (0.15, 0.3)]
        print(
            f"{len(ratios)} cells: {within[0]} within 15 %, {within[1]} within 30 %,"
            f" {inside} inside their range, median {statistics.median(ratios):.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many")
    parser.add_argument("--only", default="", help="runs whose name has this in it, such as 'ddp 4x1 200mbit'")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="run nothing")
    options = parser.parse_args()
    content = json.loads(options.json.read_text()) if options.json.exists() else {"runs": {}}
    if not options.show:
        if (reason := why_not()) is not None:
            print(f"benchmarks/predicted_steps.py cannot run here: {reason}", file=sys.stderr)
            return 2
        began = time.monotonic()
        for each in runs():
            name = name_of(*each)
            if name in content["runs"] or options.only not in name:
                continue
            if time.monotonic() - began > 60 * options.minutes:
                break
            print(name, file=sys.stderr, flush=True)
            report = {**run(*each[:3], LAYOUTS[each[3]], options), "machine": describe_machine()}
            if cells := kept(report["cells"]):
                content["runs"][name] = {**report, "cells": cells}
            options.json.write_text(json.dumps(content, indent=1) + "\n")
    show(content["runs"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
