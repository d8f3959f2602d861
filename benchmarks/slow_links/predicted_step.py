"""Measures the links as ``lowbit bench`` does, a step without communication, and steps of every variant; predicts them.

Started by torchrun on every host, for one layout: DDP, FSDP2 or HSDP. A prediction has the plan that the engine itself
is checked against, the links, and the step without communication; nothing of the step that it predicts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend)

from benchmarks.slow_links.ddp_step import NO_SYNC, StepMeter, in_rounds
from benchmarks.slow_links.fsdp_step import STOCK, STOCK_BF16, HalfModel, ShardedModel
from benchmarks.slow_links.fsdp_step import strategy_of as fsdp_strategy
from benchmarks.slow_links.measuring import fit, parse_options, strategy_of
from lowbit_strategy import OUTER_RULES
from lowbit_strategy.advisor.cost import step_time
from lowbit_strategy.advisor.measured import measure
from lowbit_strategy.advisor.uncompressed import uncompressed
from lowbit_strategy.plan.plan import StepPlan
from lowbit_strategy.plan.running import plan_of
from recipes.gpt import LanguageModel

_STOCK_ITEMSIZE = {"ddp": 4, STOCK: 4, STOCK_BF16: 2}
_PRESETS = ("loco", "loco1", "dense")
_NO_SYNC_BF16, _NO_SYNC_DDP = "no-sync-bf16", "no-sync-ddp"
_ALONE = (NO_SYNC, _NO_SYNC_BF16, _NO_SYNC_DDP)
_ALONE_STEPS = 30  # of computing: ranks that are far apart begin one after the other, and the last ends alone


class AloneInDDP(LanguageModel):
    """Under DDP, in a group of this rank alone: what DDP itself does, and no communication."""

    def configure_model(self) -> None:
        if not isinstance(self.gpt, DistributedDataParallel):
            group, _ = dist.new_subgroups(1)
            self.gpt = DistributedDataParallel(self.gpt, process_group=group)


class Alone(LanguageModel):
    """Under FSDP2 as the variants are, over ranks that send nothing: what FSDP2 itself does with shards and copies.

    What is gathered is wrong then, which takes as long.
    """

    dtype_of_weights: torch.dtype | None = None
    num_ranks: int

    def configure_model(self) -> None:
        if isinstance(self.gpt, FSDPModule):
            return
        silent, _ = dist.new_subgroups(self.num_ranks, backend="fake")
        mesh, dtype = DeviceMesh.from_group(silent, "cpu"), self.dtype_of_weights
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype))
        fully_shard(self.gpt, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype, output_dtype=torch.float32))


class HalfAlone(Alone):
    dtype_of_weights = torch.bfloat16


def measured_step(variant: str, options: Any, *, shards: int) -> tuple[StepMeter, StepPlan | None]:
    """Seconds of each step on this rank, and the plan of a strategy of ours.

    `shards`: ranks that have one model together.
    """
    L.seed_everything(0, verbose=False)
    is_stock = variant in (STOCK, STOCK_BF16)
    own_model = Alone if shards > 1 else LanguageModel
    kinds = {STOCK: ShardedModel, STOCK_BF16: HalfModel, NO_SYNC: own_model, _NO_SYNC_BF16: HalfAlone}
    kinds[_NO_SYNC_DDP] = AloneInDDP
    kind = kinds.get(variant, LanguageModel)
    model = kind(options.width, options.depth, heads=4, context=options.context)
    if isinstance(model, Alone):
        model.num_ranks = shards
    rule = OUTER_RULES.get(variant.rpartition("_")[0])
    own = options if rule is None else in_rounds(options, rule)
    alone = variant in _ALONE
    if alone:
        own = argparse.Namespace(**{**vars(own), "steps": _ALONE_STEPS})
    meter = StepMeter(own)
    if alone:
        fit(model, meter, own, strategy=SingleDeviceStrategy(device="cpu"), devices=1, num_nodes=1)
        return meter, None
    strategy = fsdp_strategy(variant, int(os.environ["WORLD_SIZE"])) if is_stock else strategy_of(variant)
    plans: list[StepPlan] = []

    class KeepPlan(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            sync = getattr(trainer.strategy, "sync", None)
            if sync is not None:
                plans.append(plan_of(sync))

    model.configure_callbacks = lambda: [KeepPlan()]  # type: ignore[method-assign]
    fit(model, meter, own, strategy=strategy)
    return meter, plans[0] if plans else None


def over_ranks(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each variant's steps, the mean over ranks; the same on all ranks."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds)
    return {
        variant: [statistics.mean(step) for step in zip(*(each[variant] for each in everyone), strict=True)]
        for variant in seconds
    }


def _preset_of(variant: str) -> str:
    """Whose codecs a strategy uses; DiLoCo's is the default."""
    name = variant.rpartition("_")[0]
    return name if name in _PRESETS else "loco"


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    cluster = measure(_PRESETS, torch.device("cpu")).cluster
    layouts = {variant.rpartition("_")[2] for variant in options.variants}
    shards = int(os.environ["LOCAL_WORLD_SIZE"]) if "hsdp" in layouts else dist.get_world_size()
    shards = 1 if "ddp" in layouts else shards
    times: dict[str, list[float]] = {}
    plans: dict[str, StepPlan] = {}
    alone = [NO_SYNC, *([_NO_SYNC_BF16] if STOCK_BF16 in options.variants else [])]
    alone += [_NO_SYNC_DDP] if shards == 1 else []
    for variant in (*alone, *options.variants, *alone):  # how fast processors are changes: before and after
        meter, plan = measured_step(variant, options, shards=shards)
        times.setdefault(variant, []).extend(meter.times_s)
        if plan is not None:
            plans[variant] = plan
    by_variant = over_ranks(times)
    basis = next(plan for variant, plan in plans.items() if plan.round_plan is None)
    cells = {}
    for variant in options.variants:
        itemsize = _STOCK_ITEMSIZE.get(variant, 4)
        plan = plans.get(variant) or uncompressed(basis, itemsize, itemsize)
        by_step = by_variant[variant]
        measured = statistics.mean(by_step) if plan.round_plan is not None else statistics.median(by_step)
        own = _NO_SYNC_BF16 if variant == STOCK_BF16 else NO_SYNC
        if shards == 1 and plan.round_plan is None:  # local steps leave DDP's buckets alone
            own = _NO_SYNC_DDP
        before, after = by_variant[own][:_ALONE_STEPS], by_variant[own][_ALONE_STEPS:]
        alone_s = [statistics.median(before), statistics.median(after)]
        compute_s = statistics.mean(alone_s)
        predicted = step_time(plan, cluster.coding_as(_preset_of(variant)), compute_s)
        timed = {"measured_s": measured, "steps_s": by_step, "alone_s": alone_s, "compute_s": compute_s}
        cells[variant] = {**timed, **asdict(predicted)}
    if int(os.environ["LOCAL_RANK"]) == 0:
        options.report.write_text(json.dumps({"cluster": asdict(cluster), "cells": cells}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
