"""Floats that are sent as they are: the public ops of exempt tensors, one call for all pieces of a bucket."""

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


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: DenseFormat, *, alpha: float = 1.0) -> None:
    """``out[segment] = alpha * sum over sources``, added in float32 in rank order.

    Args:
        wire_WB: uint8 [W, B], one row per source, rows contiguous.
        out: float32, bfloat16 or float16, 1-D contiguous; only the segments' elements are written.
        segments: Which pieces; ``x_offset`` is the place in `out`.
        fmt: What the sources were encoded with.
        alpha: Factor applied to the float32 sum before the cast to `out`'s dtype; 1/W makes it a mean.
    """
    check_buffers(out, wire_WB)
    backends.implementation("dense", out.device).decode_sum_(wire_WB, out, segments, fmt, alpha=alpha)
