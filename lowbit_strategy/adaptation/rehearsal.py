"""Tries a controller's levels on one rank before training, so that kernels are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import LocalComm, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.ranks.ranks import Ranks

# One parameter for each method in a configuration: compressed, high precision, exempt.
_SPECS = (TensorSpec("matrix", (128, 512)), TensorSpec("table", (128, 512), "embedding"), TensorSpec("vector", (96,)))
_DTYPES = (torch.float32, torch.bfloat16)  # dtypes of gradients: the actual one is known in the first step


class SingleRankBucket:
    """Parameters as one bucket, reduced by this rank alone, as if the other `world_size` - 1 ranks sent nothing."""

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        device: torch.device,
        *,
        world_size: int = 1,
        sharded: bool = True,
        seed: int = 0,
    ) -> None:
        ranks = Ranks.flat(LocalComm(world_size))
        self.sync = GradientSync(compressor, specs, ranks, device, sharded=sharded, seed=seed)
        widths = [self.sync.state.row_numel(spec.name) if sharded else spec.numel for spec in specs]
        *offsets, self.numel = itertools.accumulate(widths, initial=0)
        entries = tuple((spec.name, at) for spec, at in zip(specs, offsets, strict=True))
        self._layout = BucketLayout(entries, self.numel if sharded else None)

    def reduce(self, x: Tensor, out: Tensor) -> None:
        """One step."""
        self.sync.begin_step()
        wait_for_all(self.sync.reduce(self._layout, x, out))
        self.sync.end_step()


def rehearse(level: Compressor, *, world_size: int, sharded: bool, device: torch.device) -> None:
    """Reduce a small bucket as one of `world_size` ranks would: both hops, every kind of parameter, every dtype.

    Triton compiles a kernel per format, dtype and remainder of the number of ranks, not per size. A `Reducer` has no
    kernels to compile.
    """
    specs = [spec for spec in _SPECS if isinstance(level.assign(spec).method, CodecPair)]
    if not specs:
        return
    for dtype in _DTYPES:
        bucket = SingleRankBucket(level, specs, device, world_size=world_size, sharded=sharded)
        x = torch.ones(bucket.numel * world_size if sharded else bucket.numel, dtype=dtype, device=device)
        bucket.reduce(x, torch.empty(bucket.numel, dtype=dtype, device=device) if sharded else x)
