"""Running a configuration once on small tensors, so that no later switch to it waits for a compiler."""

from __future__ import annotations

import torch

from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.telemetry.measure import AloneBucket

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
        bucket = AloneBucket(level, specs, device, world_size=world_size, scatter=scatter)
        x = torch.ones(bucket.numel * world_size if scatter else bucket.numel, dtype=dtype, device=device)
        bucket.reduce(x, torch.empty(bucket.numel, dtype=dtype, device=device) if scatter else x)
