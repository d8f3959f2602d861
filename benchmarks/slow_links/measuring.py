"""What the scripts that run on the hosts share: their options, their rounds, their reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from torch.utils.data import DataLoader

from recipes.gpt import LanguageModel
from recipes.text import Windows, standard_library


class Measurement(NamedTuple):
    """One round of one variant on one rank. `numel`: gradient elements that a step reduces."""

    times_s: list[float]
    sent_nbytes: list[float]
    numel: int


def parse_options(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--variants", nargs="+", required=True)
    for name in ("--rounds", "--steps", "--warmup-steps", "--width", "--depth", "--context", "--batch-size", "--numel"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    return parser.parse_args()


def measure_in_turn(measure: Callable[[str], Measurement], options: argparse.Namespace) -> None:
    """Round after round, every variant in turn: what else the machine does meanwhile falls on all of them alike."""
    report: dict[str, dict[str, Any]] = {}
    for _ in range(options.rounds):
        for variant in options.variants:
            measured = measure(variant)
            entry = report.setdefault(variant, {"times_s": [], "sent_nbytes": [], "numel": measured.numel})
            entry["times_s"] += measured.times_s
            entry["sent_nbytes"] += measured.sent_nbytes
    options.report.write_text(json.dumps(report))


def fit(model: LanguageModel, meter: L.Callback, options: argparse.Namespace, **where: Any) -> None:
    """Train for the warm-up and the measured steps; `where` goes to the Trainer as a user would write it."""
    trainer = L.Trainer(
        **where,
        accelerator="cpu",
        devices=1,
        max_steps=options.warmup_steps + options.steps,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    text = Windows(standard_library("validation"), options.context)
    trainer.fit(model, DataLoader(text, batch_size=options.batch_size, shuffle=True))
