"""The demo's GPT on Python source, four ranks: Accordion and schedules between 8 and 2 bits against fixed bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.adaptive_runs.ranks import ThreadedRanks
from lowbit_strategy.control import Accordion, Phase, Schedule
from lowbit_strategy.control.base import Controller
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.telemetry.custom_loop import LoopClock
from recipes.gpt import GPT
from recipes.text import standard_library

WORLD_SIZE = 4
WIDTH, DEPTH, HEADS, CONTEXT = 112, 4, 4, 64
BATCH = 8  # a rank
STEPS = 400
LEARNING_RATE, WARMUP_STEPS = 2e-3, 20
AVERAGED_STEPS = 50  # the training loss is the mean over the last ones
VALIDATION_WINDOWS = 256

EIGHT, TWO = LoCo(bits=8), LoCo(bits=2, codebook="fitted", block_size=64)


def methods() -> dict[str, Compressor | Controller]:
    """Everything that is compared, by name; the first is what the others are measured against."""
    last_tenth = Phase(compressor=EIGHT, start=0.9, unit="fraction")
    return {
        "uncompressed": Dense(),
        "8 bits": EIGHT,
        "6 bits": LoCo(bits=6),
        "4 bits": LoCo(bits=4),
        "3 bits": preset("loco3"),
        "2 bits": TWO,
        "Accordion 8 / 2, eta 0.5": _accordion(0.5, 20),
        "Accordion 8 / 2, eta 0.25": _accordion(0.25, 20),
        "Accordion 8 / 2, eta 0.1": _accordion(0.1, 20),
        "Accordion 8 / 2, eta 0.1, interval 5": _accordion(0.1, 5),
        "8, then 2, last tenth 8": Schedule([Phase(compressor=EIGHT), Phase(compressor=TWO, start=40), last_tenth]),
    }


def _accordion(eta: float, interval: int) -> Accordion:
    return Accordion(light=EIGHT, heavy=TWO, eta=eta, interval=interval, unit="steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageRun:
    """One run: losses, bytes, and how it went."""

    method: str
    seed: int
    train_loss: float
    validation_loss: float
    sent_nbytes: float
    bits_per_element: float
    num_switches: int
    light_share: float


def train(name: str, method: Compressor | Controller, seed: int) -> LanguageRun:
    """The whole run; deterministic. All methods see the same initial weights and batches."""
    torch.manual_seed(seed)
    model = GPT(WIDTH, DEPTH, HEADS, CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor)
    ranks = ThreadedRanks(model, method, LoopClock(optimizer, STEPS), WORLD_SIZE, seed)
    text = standard_library("train")
    order = torch.Generator().manual_seed(10_000 + seed)
    losses: list[float] = []
    light = 0.0
    for _ in range(STEPS):
        gradients, total = [], 0.0
        for _ in range(WORLD_SIZE):
            starts = torch.randint(text.numel() - CONTEXT - 1, (BATCH,), generator=order)
            loss = _loss(model, text, starts)
            gradients.append(torch.autograd.grad(loss, list(model.parameters())))
            total += loss.item()
        losses.append(total / WORLD_SIZE)
        ranks.mean_(model, gradients)
        optimizer.step()
        scheduler.step()
        light += ranks.light_share()
    ranks.close()
    hops = 2 * (WORLD_SIZE - 1) / WORLD_SIZE
    return LanguageRun(
        method=name,
        seed=seed,
        train_loss=sum(losses[-AVERAGED_STEPS:]) / AVERAGED_STEPS,
        validation_loss=_validation_loss(model),
        sent_nbytes=ranks.sent_nbytes,
        bits_per_element=8 * ranks.sent_nbytes / STEPS / ranks.numel / hops,
        num_switches=ranks.num_switches,
        light_share=light / STEPS,
    )


def _loss(model: GPT, text: Tensor, starts: Tensor) -> Tensor:
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def _validation_loss(model: GPT) -> float:
    text = standard_library("validation")
    starts = torch.arange(VALIDATION_WINDOWS) * ((text.numel() - CONTEXT - 1) // VALIDATION_WINDOWS)
    losses = [_loss(model, text, part).item() for part in starts.split(32)]
    return sum(losses) / len(losses)


def _learning_rate_factor(step: int) -> float:
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))
