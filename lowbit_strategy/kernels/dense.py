"""Floats that are sent as they are: the public op that encodes exempt tensors, one call for all pieces of a bucket.

They are decoded by `lowbit_strategy.kernels.blocks.decode_sum_`.
"""

from __future__ import annotations

from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.blocks import check_buffers
from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.segments import Segments


def encode_(x: Tensor, wire: Tensor, segments: Segments, fmt: DenseFormat, *, flag: Tensor) -> None:
    """Write each segment of `x` to `wire`, in the format's dtype.

    Args:
        x: float32, bfloat16 or float16, 1-D contiguous.
        wire: uint8, 1-D contiguous; written at each segment's ``wire_offset``.
        segments: Which pieces; ``state_offset`` and ``salt`` are not used.
        fmt: The dtype on the wire.
        flag: int32 [1], set to 1 if any number that is sent is inf or NaN, else left as it is.
    """
    check_buffers(x, wire)
    backends.implementation("dense", x.device).encode_(x, wire, segments, fmt, flag=flag)
