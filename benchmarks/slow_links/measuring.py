"""What the scripts that run on the hosts share: their options, variants, rounds and reports."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader

from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.methods.registry import preset
from recipes.gpt import LanguageModel
from recipes.text import Windows, standard_library

INSIDE_HOST = "inside-host"


class Measurement(NamedTuple):
    """One round of one variant: times of a rank, bytes of its host. `numel`: gradient elements that a step reduces."""

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
    if int(os.environ["LOCAL_RANK"]) == 0:
        options.report.write_text(json.dumps(report))


def fit(model: LanguageModel, meter: L.Callback, options: argparse.Namespace, **where: Any) -> None:
    """Train for the warm-up and the measured steps; `where` goes to the Trainer as a user would write it."""
    ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = {"num_nodes": int(os.environ["WORLD_SIZE"]) // ranks_per_host, "devices": ranks_per_host}
    trainer = L.Trainer(
        **hosts | where,
        accelerator="cpu",
        max_steps=options.warmup_steps + options.steps,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    text = Windows(standard_library("validation"), options.context)
    trainer.fit(model, DataLoader(text, batch_size=options.batch_size, shuffle=True))


class InsideHost(LowBitFSDPStrategy):
    """HSDP that never synchronizes between hosts: what a step costs without them."""

    def __init__(self) -> None:
        super().__init__("loco", shard_size="node", check_digest=False)

    def take_over(self, session: Any) -> None:
        super().take_over(session)
        for module in self.model.modules() if self.model is not None else ():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda reduced: None)


def strategy_of(variant: str) -> Any:
    """A strategy's name, with ``:flat`` for one level of ranks, ``:all`` without high precision for embeddings and
    heads, ``:squares`` for Adam's second moment of ranks' squares, and ``:bucket4`` for DDP's buckets of 4 MB.
    """
    name, *changes = variant.split(":")
    if not changes:
        return InsideHost() if name == INSIDE_HOST else name
    compressor, _, kind = name.rpartition("_")
    chosen = preset(compressor)
    if "all" in changes:
        chosen = dataclasses.replace(chosen, high_precision=())
    options: dict[str, Any] = {"two_level": False} if "flat" in changes else {}
    options["second_moment"] = "squares" in changes
    for change in changes:
        if change.startswith("bucket"):
            options["bucket_cap_mb"] = float(change.removeprefix("bucket"))
    return (LowBitDDPStrategy if kind == "ddp" else LowBitFSDPStrategy)(chosen, **options)
