"""Measures the links as ``lowbit bench`` does, a step without communication, and steps of every variant; predicts them.

Started by torchrun on every host, for one layout: DDP, FSDP2 or HSDP. A prediction has the plan that the engine itself
is checked against, the links, and the step without communication; nothing of the step that it predicts.
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import asdict
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy

from benchmarks.slow_links.ddp_step import NO_SYNC, StepMeter, in_rounds
from benchmarks.slow_links.fsdp_step import STOCK, STOCK_BF16, HalfModel, ShardedModel
from benchmarks.slow_links.fsdp_step import strategy_of as fsdp_strategy
from benchmarks.slow_links.measuring import fit, parse_options, strategy_of
from lowbit_strategy import OUTER_RULES, LoCo
from lowbit_strategy.plan.bench import slowest
from lowbit_strategy.plan.cost import Cluster, step_time, uncompressed
from lowbit_strategy.plan.plan import Plan
from lowbit_strategy.ranks.ranks import make_ranks
from lowbit_strategy.ranks.topology import find_topology
from lowbit_strategy.telemetry.links import coded_per_s, measure_levels
from recipes.gpt import LanguageModel

_STOCK_ITEMSIZE = {"ddp": 4, STOCK: 4, STOCK_BF16: 2}


def measured_cluster() -> Cluster:
    """The same on all ranks."""
    device, topology = torch.device("cpu"), find_topology()
    size = topology.ranks_per_node if topology.obstacle is None else None
    ranks = make_ranks(None, topology, size, device, scatter=False)
    mine = (*measure_levels(ranks, device), coded_per_s(LoCo(), device))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    ranks.destroy()
    between, inside, coded = zip(*everyone, strict=True)
    return Cluster(inter_node=slowest(between), intra_node=slowest(inside), encoded_per_s=min(coded))


def measured_step(variant: str, options: Any) -> tuple[list[float], Plan | None]:
    """Seconds of each step on this rank, and the plan of a strategy of ours."""
    L.seed_everything(0, verbose=False)
    is_stock = variant in (STOCK, STOCK_BF16)
    kind = {STOCK: ShardedModel, STOCK_BF16: HalfModel}.get(variant, LanguageModel)
    model = kind(options.width, options.depth, heads=4, context=options.context)
    rule = OUTER_RULES.get(variant.rpartition("_")[0])
    meter = StepMeter(options if rule is None else in_rounds(options, rule))
    own = options if rule is None else in_rounds(options, rule)
    if variant == NO_SYNC:
        fit(model, meter, own, strategy=SingleDeviceStrategy(device="cpu"), devices=1, num_nodes=1)
        return meter.times_s, None
    strategy = fsdp_strategy(variant, int(os.environ["WORLD_SIZE"])) if is_stock else strategy_of(variant)
    plans: list[Plan] = []

    class KeepPlan(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            sync = getattr(trainer.strategy, "sync", None)
            if sync is not None:
                plans.append(sync.plan())

    model.configure_callbacks = lambda: [KeepPlan()]  # type: ignore[method-assign]
    fit(model, meter, own, strategy=strategy)
    return meter.times_s, plans[0] if plans else None


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster = measured_cluster()
    times: dict[str, list[float]] = {}
    plans: dict[str, Plan] = {}
    for _ in range(options.rounds):
        for variant in (NO_SYNC, *options.variants):
            seconds, plan = measured_step(variant, options)
            times.setdefault(variant, []).extend(seconds)
            if plan is not None:
                plans[variant] = plan
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    compute_s = statistics.median(statistics.mean(each) for each in zip(*(e[NO_SYNC] for e in everyone), strict=True))
    basis = next(plan for variant, plan in plans.items() if plan.outer is None)
    cells = {}
    for variant in options.variants:
        plan = plans.get(variant) or uncompressed(basis, _STOCK_ITEMSIZE[variant])
        by_step = [statistics.mean(each) for each in zip(*(each[variant] for each in everyone), strict=True)]
        measured = statistics.mean(by_step) if plan.outer is not None else statistics.median(by_step)
        cells[variant] = {"measured_s": measured, "steps_s": by_step, **asdict(step_time(plan, cluster, compute_s))}
    if int(os.environ["LOCAL_RANK"]) == 0:
        options.report.write_text(json.dumps({"cluster": asdict(cluster), "compute_s": compute_s, "cells": cells}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
