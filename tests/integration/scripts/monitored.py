"""A monitored Lightning run on one of several hosts: the bytes that the monitor reports, and what the interface counts.

Started by torchrun on every host; observes every step, counts all steps but the first two.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn

from lowbit_strategy.lightning import CompressionMonitor
from lowbit_strategy.methods.registry import preset
from testing.counting import interface as counters
from testing.counting.traffic import Traffic, count_traffic
from testing.training.regression import OUTPUTS, WIDTH, Regression, loader, strategy, trainer

WARMUP_STEPS, STEPS = 2, 10


class Meter(Callback):
    """The interface's counters and the communicator's between two barriers."""

    def __init__(self, monitor: CompressionMonitor, traffic: Traffic) -> None:
        self.monitor = monitor
        self.traffic = traffic
        self.observed: list[float] = []
        self.sampled: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if self.monitor.last is not None and self.monitor.last.step == WARMUP_STEPS - 1:
            dist.barrier()
            self.before = counters.read()
            self.traffic.calls.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        last = self.monitor.last
        assert last is not None
        if last.step >= WARMUP_STEPS:
            self.observed.append(last.sent_nbytes)
            assert self.monitor.control is not None
            self.sampled.append(self.monitor.control.observer.sampling_nbytes)
        if last.step == STEPS - 1:
            self.calls = dict(self.traffic.calls)
            dist.barrier()  # nothing is on its way any more
            self.counted = counters.read() - self.before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compressors", nargs="+", required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    report = {}
    for name in options.compressors:
        monitor = CompressionMonitor(every_n_steps=1, progress_bar=False)
        traffic = Traffic()
        meter = Meter(monitor, traffic)
        hidden = nn.Linear(512, 512)  # big, so that bytes are not all framing
        model = Regression(nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(512, OUTPUTS)))
        made = trainer(
            strategy("ddp", preset(name)),
            devices=1,
            num_nodes=2,
            max_steps=STEPS,
            callbacks=[monitor, meter],
        )
        with count_traffic(traffic):
            made.fit(model, loader())
        report[name] = {
            "observed": meter.observed,
            "sampled": meter.sampled,
            "counted": asdict(meter.counted),
            "calls": meter.calls,
            "num_parameters": len(list(model.parameters())),
        }
    options.report.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
