"""Steps of an engine on CUDA, on no data: see `host_code`."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec, dim0_row_numel
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.ranks.ranks import Ranks
from testing.cuda.host_code import CUDA, NoHostSync, on_cuda
from testing.worlds.echo import EchoComm

WORLD_SIZE = 8
SPECS = [TensorSpec(f"layer.{i}.weight", (256, 192)) for i in range(6)]
SPECS += [TensorSpec(f"layer.{i}.bias", (256,)) for i in range(8)]


def bucket(*, sharded: bool) -> tuple[BucketLayout, int]:
    entries, at = [], 0
    for spec in SPECS:
        entries.append((spec.name, at))
        at += dim0_row_numel(spec.shape, WORLD_SIZE) if sharded else spec.numel
    return BucketLayout(tuple(entries), at if sharded else None), at


def step(sync: GradientSync, layout: BucketLayout, x: Tensor, out: Tensor) -> None:
    sync.begin_step()
    sync.begin_step()
    wait_for_all(sync.reduce(layout, x, out))
    sync.end_step()


def check_no_step_waits(compressor: Compressor, dtype: torch.dtype, *, sharded: bool) -> None:
    """Three steps, after one that makes tables and copies them to the device."""
    layout, numel = bucket(sharded=sharded)
    with on_cuda() as launched:
        sync = GradientSync(compressor, SPECS, Ranks.flat(EchoComm(WORLD_SIZE)), CUDA, sharded=sharded)
        x = torch.empty(numel * WORLD_SIZE if sharded else numel, dtype=dtype, device=CUDA)
        out = torch.empty(numel, dtype=dtype, device=CUDA) if sharded else x
        step(sync, layout, x, out)
        launched.clear()
        with NoHostSync():
            for _ in range(3):
                step(sync, layout, x, out)
    kinds = 1 if isinstance(compressor, Dense) else 2
    assert len(launched) == 3 * kinds * (2 if sharded else 4)
