"""One rank without processes: an engine, and a step of it on given gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import LocalComm, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.ranks.ranks import Ranks

SPECS = (TensorSpec("blocks.0.weight", (48, 64)), TensorSpec("blocks.1.weight", (48, 64)), TensorSpec("bias", (37,)))
Grads = dict[str, Tensor]


def engine(
    compressor: Compressor, specs: Sequence[TensorSpec] = SPECS, *, sharded: bool = False, **options: Any
) -> GradientSync:
    return GradientSync(compressor, specs, Ranks.flat(LocalComm()), torch.device("cpu"), sharded=sharded, **options)


def gradients(step: int, specs: Sequence[TensorSpec] = SPECS, *, scale: float = 1.0) -> Grads:
    generator = torch.Generator().manual_seed(1000 + step)
    return {spec.name: scale * torch.randn(spec.numel, generator=generator) for spec in specs}


def reduce_step(sync: GradientSync, grads: Mapping[str, Tensor], *, end: bool = True) -> Grads:
    """One bucket with everything; what came out, by name."""
    x = torch.cat(list(grads.values()))
    entries, at = [], 0
    for name, values in grads.items():
        entries.append((name, at))
        at += values.numel()
    out = torch.empty_like(x) if sync.sharded else x
    sync.begin_step()
    wait_for_all(sync.reduce(BucketLayout(tuple(entries), at if sync.sharded else None), x, out))
    if end:
        sync.end_step()
    return {name: out[at : at + grads[name].numel()].clone() for name, at in entries}
