"""Strategies and precisions under the Trainer on a Llama-shaped model, beside stock: one rank per GPU, all of them.

A single GPU is shared by four ranks: losses are judged, memory and times are written down.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.gpu_acceptance.checks import Check, Figures, LeftOut, Missed
from benchmarks.gpu_acceptance.llama import llama
from lowbit_strategy import Auto, DiLoCo, LoCo, WeightDelta
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from testing.processes.ranks import run_ranks

STEP_BAR = 1.1  # of stock's time
LOSS_BAR = 1.1  # of stock's last losses
BLOCK = 10_000  # elements from which a block is sharded by itself


def ddp(**options: Any) -> Any:
    return LowBitDDPStrategy(LoCo(), **options)


def fsdp(**options: Any) -> Any:
    return LowBitFSDPStrategy(LoCo(), **{"min_shard_numel": BLOCK} | options)


def choosing_fsdp(**options: Any) -> Any:
    return LowBitFSDPStrategy(Auto(), **{"min_shard_numel": BLOCK} | options)


def stock(kind: str) -> Any:
    """What is compared with: DDP, or FSDP2 with nothing compressed and weights as they are."""
    return DDPStrategy() if kind == "ddp" else LowBitFSDPStrategy("dense", weights="exact", min_shard_numel=BLOCK)


def num_ranks(device: torch.device) -> int:
    return 4 if is_shared(device) else torch.cuda.device_count()


def is_shared(device: torch.device) -> bool:
    """Several ranks compute on one device."""
    return device.type == "cpu" or torch.cuda.device_count() == 1


def measured(device: torch.device, make: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """The first rank's figures, and the largest peak of all."""
    steps = 6 if device.type == "cpu" else 30 if is_shared(device) else 100
    given = {"kind": device.type, "strategy": make, "precision": "bf16-mixed", "steps": steps, **options}
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_ranks(llama, num_ranks(device), folder, given, timeout=200, process_group=None)
    return {**ranks[0], "peak_nbytes": max(rank["peak_nbytes"] for rank in ranks)}


@functools.cache
def stock_of(device: torch.device, kind: str, options: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return measured(device, functools.partial(stock, kind), **dict(options))


def beside_stock(device: torch.device, kind: str, make: Callable[[], Any], **options: Any) -> Figures:
    """100 steps: loss, peak memory, time.

    Raises:
        Missed: It does not learn as stock does, or a step takes too long.
    """
    shared = {key: value for key, value in options.items() if key in ("precision", "steps", "accumulate", "recompute")}
    theirs = stock_of(device, kind, tuple(sorted(shared.items())))
    ours = measured(device, make, **options)
    return compared(ours, theirs, timed=not is_shared(device))


def compared(ours: dict[str, Any], theirs: dict[str, Any], *, timed: bool) -> Figures:
    tail = max(1, len(theirs["losses"]) // 5)
    losses = [sum(run["losses"][-tail:]) / tail for run in (ours, theirs)]
    figures = {"loss": losses[0], "loss_of_stock": losses[1], "step_of_stock": ours["step_s"] / theirs["step_s"]}
    figures |= {"step_s": ours["step_s"], "step_s_of_stock": theirs["step_s"]}
    if theirs["peak_nbytes"]:
        figures |= {"peak_gb": ours["peak_nbytes"] / 1e9, "peak_of_stock": ours["peak_nbytes"] / theirs["peak_nbytes"]}
    if not losses[0] < LOSS_BAR * losses[1]:
        raise Missed(f"the loss ends at {losses[0]:.4f}, stock's at {losses[1]:.4f}", figures)
    if timed and figures["step_of_stock"] > STEP_BAR:
        why = f"a step takes {figures['step_of_stock']:.2f} of stock's time, at most {STEP_BAR} is allowed"
        raise Missed(why, figures)
    return figures


def levels(device: torch.device) -> int:
    """Ranks per node, as if there were two nodes."""
    if num_ranks(device) < 4 or num_ranks(device) % 2:
        raise LeftOut(f"two nodes of several ranks need an even number of at least 4, and here are {num_ranks(device)}")
    return num_ranks(device) // 2


def check(name: str, kind: str, make: Callable[..., Any], *, nodes: bool = False, **options: Any) -> Check:
    def run(device: torch.device) -> Figures:
        given = dict(options)
        if nodes:
            given["per_node"] = levels(device)
        if given.pop("own_mesh", False):
            given["mesh_of"] = levels(device)
            return beside_stock(device, kind, functools.partial(make, shard_size=levels(device)), **given)
        return beside_stock(device, kind, make, **given)

    return Check(name=name, run=run)


PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
CHECKS = (
    *(check(f"loco_fsdp, {precision}", "fsdp", fsdp, precision=precision) for precision in PRECISIONS),
    *(check(f"loco_ddp, {precision}", "ddp", ddp, precision=precision) for precision in PRECISIONS),
    check("lowbit_ddp chooses", "ddp", functools.partial(LowBitDDPStrategy, Auto()), steps=40),
    check("lowbit_fsdp chooses", "fsdp", choosing_fsdp, steps=40),
)
MORE = (
    check("loco_fsdp, micro-batches kept", "fsdp", fsdp, accumulate=2),
    check("loco_fsdp, micro-batches reduced", "fsdp", functools.partial(fsdp, accumulate="reduce"), accumulate=2),
    check("loco_fsdp, activation checkpointing", "fsdp", fsdp, recompute=True),
    check("loco_fsdp, differences of weights", "fsdp", functools.partial(fsdp, weights=WeightDelta())),
    check("loco_ddp, two levels", "ddp", ddp, nodes=True),
    check("loco_fsdp, two levels", "fsdp", fsdp, nodes=True),
    check("loco_hsdp", "fsdp", functools.partial(fsdp, shard_size="node"), nodes=True),
    check("loco_hsdp on a mesh of one's own", "fsdp", fsdp, nodes=True, own_mesh=True),
    check("outer steps", "ddp", functools.partial(LowBitDDPStrategy, outer=DiLoCo(every=2))),
)
