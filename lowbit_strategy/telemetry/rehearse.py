"""Running a configuration once on small tensors, so that no later switch to it waits for a compiler."""

from __future__ import annotations

import itertools

import torch

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.ranks.ranks import Ranks

# One parameter for each method that a configuration may give: compressed, high precision, exempt.
_SPECS = (
    TensorSpec("matrix", (128, 512)),
    TensorSpec("table", (128, 512), "embedding"),
    TensorSpec("vector", (96,)),
)
_DTYPES = (torch.float32, torch.bfloat16)  # of gradients: which one it will be shows in the first step


def rehearse(level: Compressor, *, world_size: int, scatter: bool, device: torch.device) -> None:
    """Reduce a small bucket as a rank of `world_size` would: both hops, every kind of parameter, every dtype.

    Triton compiles a kernel for a format, a dtype and what is left of the number of ranks, not for sizes. Methods with
    communication of their own have no kernels to compile.
    """
    specs = [spec for spec in _SPECS if isinstance(level.assign(spec).method, CodecPair)]
    for dtype in _DTYPES if specs else ():
        sync = GradientSync(level, specs, Ranks.flat(LocalComm(world_size)), device, scatter=scatter)
        widths = [sync.state.row_numel(spec.name) if scatter else spec.numel for spec in specs]
        *offsets, total = itertools.accumulate(widths, initial=0)
        entries = tuple(Entry(spec.name, at) for spec, at in zip(specs, offsets, strict=True))
        x = torch.ones(total * world_size if scatter else total, dtype=dtype, device=device)
        out = torch.empty(total, dtype=dtype, device=device) if scatter else x
        sync.begin_step()
        wait_for_all(sync.reduce(BucketLayout(entries, total if scatter else None), x, out))
        sync.end_step()
