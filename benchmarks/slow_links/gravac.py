"""A plain Lightning script: GraVAC searches, then every candidate by itself; times and compression gains to a file.

Started by torchrun on every host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lowbit_strategy.control import GraVAC
from lowbit_strategy.control.levels import describe
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor, LowBitDDPStrategy
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.topk import TopK
from recipes.gpt import LanguageModel
from recipes.text import Windows, standard_library

FAMILIES: dict[str, tuple[tuple[Compressor, ...], float]] = {  # candidates and the smallest compression gain
    "topk": (GraVAC.geometric(TopK(), "density", 0.1, 0.003, num=4), 0.15),
    "loco": (tuple(LoCo(bits=bits) for bits in (8, 6, 4, 3, 2)), 0.75),
}
MEASURE_EVERY = 4


class Meter(L.Callback):
    """Seconds from the end of one step to the end of the next, and what a monitor saw, from one step on.

    Args:
        monitor: Observes.
        first_step: Steps before it are left out.
    """

    def __init__(self, monitor: CompressionMonitor, first_step: int) -> None:
        self.monitor = monitor
        self.first_step = first_step
        self.times_s: list[float] = []
        self.compression_gains: list[float] = []
        self._seen = -1
        self._last: float | None = None

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        now, last = time.perf_counter(), self._last
        judged = trainer.global_step > self.first_step
        observation = self.monitor.last
        if observation is not None and observation.step != self._seen:
            self._seen = observation.step
            if judged:
                self.compression_gains.append(1 - observation.total.relative_error**2)
        elif judged and last is not None:  # a step that was observed is longer than the method makes it
            self.times_s.append(now - last)
        self._last = time.perf_counter()


def fit(strategy: Any, callbacks: list[L.Callback], steps: int, options: argparse.Namespace) -> None:
    L.seed_everything(0, verbose=False)
    model = LanguageModel(options.width, options.depth, heads=4, context=options.context)
    trainer = L.Trainer(
        strategy=strategy,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    text = Windows(standard_library("train"), options.context)
    trainer.fit(model, DataLoader(text, batch_size=options.batch_size, shuffle=True))


def searching(options: argparse.Namespace) -> tuple[GraVAC, int]:
    """The controller, and the steps in which it has certainly settled."""
    candidates, epsilon = FAMILIES[options.family]
    controller = GraVAC(
        candidates=candidates, epsilon=epsilon, omega=0.0, window=options.window, ewma=0.2, measure_every=MEASURE_EVERY
    )
    return controller, len(candidates) * (controller.settle_steps + options.window) + 1


def search(options: argparse.Namespace) -> dict[str, Any]:
    """GraVAC's own run: what it measured, and where it ended."""
    controller, steps = searching(options)
    adaptive = AdaptiveCompression(controller, record=False)
    fit(LowBitDDPStrategy(controller.candidates[0]), [adaptive], steps, options)
    assert adaptive.driver is not None
    state, labels = adaptive.driver.state, adaptive.driver.labels
    return {
        "settled": state["settled"],
        "candidate": labels[state["candidate"]],
        "scores": {labels[int(level)]: score for level, score in state["scores"].items()},
        "compression_gains": {
            labels[int(level)]: compression_gain for level, compression_gain in state["compression_gains"].items()
        },
    }


def alone(compressor: Compressor, options: argparse.Namespace) -> dict[str, float]:
    """One candidate for as long as a search: compression gain, seconds and their score in a window at the end."""
    _, steps = searching(options)
    monitor = CompressionMonitor(every_n_steps=MEASURE_EVERY, progress_bar=False, record=False)
    meter = Meter(monitor, steps - options.window)
    fit(LowBitDDPStrategy(compressor), [monitor, meter], steps, options)
    times = torch.tensor(meter.times_s, dtype=torch.float64)
    dist.all_reduce(times)  # as the controller sees them: the ranks' mean
    seconds = float(times.median()) / dist.get_world_size()
    compression_gain = statistics.mean(meter.compression_gains)
    return {"seconds": seconds, "compression_gain": compression_gain, "score": compression_gain / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=FAMILIES, required=True)
    for name in ("--window", "--width", "--depth", "--context", "--batch-size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"search": search(options), "alone": {}}
    for compressor in FAMILIES[options.family][0]:
        report["alone"][describe(compressor)] = alone(compressor, options)
    options.report.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
