"""A plain Lightning script that trains the GPT with one strategy after the other and reports step times and bytes.

Started by torchrun on every host; what is measured is what `Trainer(strategy=NAME, num_nodes=N)` does for a user.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy

from benchmarks.slow_links.measuring import Measurement, fit, measure_in_turn, parse_options, strategy_of
from lowbit_strategy import OUTER_RULES, OuterRule  # registers the strategies' names
from recipes.gpt import LanguageModel
from testing.counting.interface import sent_nbytes

NO_SYNC = "no-sync"
_TRIAL_STEPS = 40  # in which a strategy that chooses has chosen


class StepMeter(L.Callback):
    """Times the steps after the warm-up, and counts the bytes sent meanwhile.

    With local steps what is measured are whole rounds after a first one; the mean over ranks at the end is not in it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.warmup_steps = options.warmup_steps
        self.last_step = options.warmup_steps + options.steps
        self.times_s: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.warmup_steps:
            dist.barrier()
            self._sent_before = sent_nbytes()
            self._last = time.perf_counter()
        elif trainer.global_step > self.warmup_steps:
            now = time.perf_counter()
            self.times_s.append(now - self._last)
            self._last = now
        if trainer.global_step == self.last_step:
            self._count()

    def _count(self) -> None:
        dist.barrier()  # nothing is on its way any more
        self.sent_per_step_nbytes = (sent_nbytes() - self._sent_before) / len(self.times_s)


def in_rounds(options: argparse.Namespace, rule: OuterRule) -> argparse.Namespace:
    """The same with steps that are whole rounds."""
    every = rule.round_length(0, None)
    steps = every * math.ceil(options.steps / every)
    return argparse.Namespace(**{**vars(options), "warmup_steps": every, "steps": steps})


def after_choice(options: argparse.Namespace, variant: str) -> argparse.Namespace:
    """The same, measured after `variant` has chosen, if it is a strategy that chooses (``lowbit_ddp``)."""
    trial = _TRIAL_STEPS if variant.startswith("lowbit_") else 0
    return argparse.Namespace(**{**vars(options), "warmup_steps": options.warmup_steps + trial})


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)

    def measure(strategy: str) -> Measurement:
        L.seed_everything(0, verbose=False)
        model = LanguageModel(options.width, options.depth, heads=4, context=options.context)
        rule = OUTER_RULES.get(strategy.rpartition("_")[0])
        own = after_choice(options, strategy) if rule is None else in_rounds(options, rule)
        meter = StepMeter(own)
        if strategy == NO_SYNC:  # each rank by itself, at the same time as the others
            fit(model, meter, own, strategy=SingleDeviceStrategy(device="cpu"), devices=1, num_nodes=1)
        else:
            fit(model, meter, own, strategy=strategy_of(strategy))
        numel = sum(parameter.numel() for parameter in model.parameters())
        return Measurement(meter.times_s, [meter.sent_per_step_nbytes], numel)

    measure(
        next(each for each in options.variants if each != NO_SYNC)
    )  # makes the process group, as the first Trainer of a user's script does
    measure_in_turn(measure, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
