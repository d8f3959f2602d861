"""The demo of machines that come and go: four replicas train a small GPT; one is killed and comes back, one freezes.

Runs `demo_elastic_train.py` in four processes twice, undisturbed and with the two faults, and draws the losses over
time with a band of who was there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import matplotlib
import typer
from rich.console import Console

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = ("attic", "cellar", "kitchen", "office")
KILLED, FROZEN = "cellar", "office"
AWAY_S, FROZEN_S = 5.0, 12.0
GAP_S = 2.0  # who has not written for so long was not there
Record = list[dict[str, Any]]


@contextmanager
def lighthouse() -> Iterator[str]:
    """The address of a `lowbit lighthouse` on a port that the system has chosen."""
    command = [str(Path(sys.executable).with_name("lowbit")), "lighthouse", "--bind", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+),", process.stdout.readline())
        if found is None:
            raise RuntimeError(
                "lowbit lighthouse has not started; is torchft installed? pip install 'lowbit_strategy[elastic]'"
            )
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait()


class Run:
    """Four replicas, from their start to their end."""

    def __init__(self, folder: Path, address: str, steps: int, every: int) -> None:
        self.folder, self.address, self.steps, self.every = folder, address, steps, every
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.outputs: list[TextIO] = []
        for name in NAMES:
            self.start(name)

    def start(self, name: str) -> None:
        output = (self.folder / f"{name}.log").open("a")
        self.outputs.append(output)
        script = Path(__file__).with_name("demo_elastic_train.py")
        options = {"lighthouse": self.address, "name": name, "folder": self.folder, "steps": self.steps}
        words = [f"--{key}={value}" for key, value in (options | {"every": self.every}).items()]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | dict(os.environ)
        command = [sys.executable, str(script), *words]
        self.processes[name] = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def record(self, name: str) -> Record:
        path = self.folder / f"{name}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, name: str, step: int) -> None:
        self._wait(lambda: bool(record := self.record(name)) and record[-1]["step"] >= step)

    def end(self) -> None:
        self._wait(lambda: all(process.poll() is not None for process in self.processes.values()))
        for output in self.outputs:
            output.close()
        failed = [name for name, process in self.processes.items() if process.returncode]
        if failed:
            raise RuntimeError(f"{', '.join(failed)} failed: see {self.folder / f'{failed[0]}.log'}")

    def _wait(self, condition: Callable[[], bool], limit_s: float = 1200.0) -> None:
        until = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"not done after {limit_s:g} s: see the logs in {self.folder}")
            time.sleep(0.1)

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()


def disturbed(run: Run) -> None:
    """One is killed at a third of the steps and comes back, one is stopped for a while after half of them."""
    run.wait_until(KILLED, run.steps // 3)
    run.processes[KILLED].kill()
    run.processes[KILLED].wait()
    time.sleep(AWAY_S)
    run.start(KILLED)
    run.wait_until(FROZEN, run.steps * 6 // 10)
    run.processes[FROZEN].send_signal(signal.SIGSTOP)
    time.sleep(FROZEN_S)
    run.processes[FROZEN].send_signal(signal.SIGCONT)


def losses(run: Run) -> tuple[list[float], list[float]]:
    """Seconds since the first step, and the mean of the last round's losses of all who trained then."""
    lines = sorted((line for name in NAMES for line in run.record(name)), key=lambda line: line["time"])
    window = len(NAMES) * run.every
    began = lines[0]["time"]
    at = range(window, len(lines) + 1, len(NAMES))
    return (
        [lines[end - 1]["time"] - began for end in at],
        [statistics.fmean(line["loss"] for line in lines[end - window : end]) for end in at],
    )


def presence(run: Run, name: str, began: float) -> list[tuple[float, float]]:
    """From when, and how long, it trained."""
    spans: list[list[float]] = []
    for line in run.record(name):
        at = line["time"] - began
        if spans and at - spans[-1][1] < GAP_S + AWAY_S / 5:
            spans[-1][1] = at
        else:
            spans.append([at, at])
    return [(start, end - start) for start, end in spans]


def plot(plain: Run, faulty: Run, path: Path) -> None:
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(8, 5.2), layout="constrained", sharex=True, gridspec_kw={"height_ratios": [3, 1]}
    )
    for run, label, style in ((plain, "undisturbed", "--"), (faulty, "with faults", "-")):
        top.plot(*losses(run), style, label=label)
    began = min(run_line["time"] for name in NAMES for run_line in faulty.record(name)[:1])
    for row, name in enumerate(reversed(NAMES)):
        below.broken_barh(presence(faulty, name, began), (row - 0.35, 0.7), color="tab:orange")
    below.set_yticks(range(len(NAMES)), reversed(NAMES))
    below.set(
        xlabel="seconds", title=f"who was there: {KILLED} killed and started again, {FROZEN} frozen for {FROZEN_S:g} s"
    )
    top.set(ylabel="training loss (nats per byte)", title="Small GPT, four replicas in local steps, LoCo at 4 bits")
    top.legend()
    top.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 400,
    every: Annotated[int, typer.Option(help="Steps of a round.")] = 20,
    folder: Annotated[Path, typer.Option(help="Where records and the plot go.")] = Path("runs/demo-elastic"),
) -> None:
    """Train undisturbed and with faults, then compare."""
    console = Console()
    runs = []
    for name, faults in (("undisturbed", lambda run: None), ("faults", disturbed)):
        console.rule(f"four replicas, {name}")
        with lighthouse() as address:
            run = Run(folder / name, address, steps, every)
            try:
                faults(run)
                run.end()
            finally:
                run.kill()
        runs.append(run)
        for line in (folder / name / f"{NAMES[0]}.log").read_text().splitlines():
            if "replicas (" in line:
                console.print(line, soft_wrap=True)
    plain, faulty = runs
    console.rule("Result")
    for run, label in ((plain, "undisturbed"), (faulty, "with faults")):
        lines = [line["loss"] for name in NAMES for line in run.record(name)[-run.every :]]
        trained = sum(len(run.record(name)) for name in NAMES)
        console.print(f"{label}: loss of the last round {statistics.fmean(lines):.4f}, {trained} steps of replicas")
    picture = folder / "loss.png"
    plot(plain, faulty, picture)
    console.print(f"Losses, and who was there: {picture}")


if __name__ == "__main__":
    typer.run(main)
