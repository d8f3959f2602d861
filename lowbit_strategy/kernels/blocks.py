"""Public ops for blockwise quantization and for plain floats. They check their arguments and call a backend.

Every backend writes the same bytes, which `lowbit_strategy.kernels.reference` defines.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import DenseFormat, Format
from lowbit_strategy.kernels.segments import Segments

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_RESIDUALS = ((torch.int8, torch.bfloat16), (torch.float32, None))


def _what_is_wrong(x: Tensor, wire: Tensor) -> TypeError | ValueError:
    if x.dtype not in _FLOATS:
        return TypeError(f"gradients must be float32, bfloat16 or float16, got {x.dtype}")
    if wire.dtype != torch.uint8:
        return TypeError(f"the wire must be uint8, got {wire.dtype}")
    if x.device != wire.device:
        return ValueError(f"gradients are on {x.device} but the wire is on {wire.device}")
    return ValueError("the gradient buffer must be contiguous")


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: Format,
    *,
    flag: Tensor,
    stochastic: bool = False,
    seed: int = 0,
    feedback: Feedback | None = None,
) -> None:
    """Quantize each segment of `x` into `wire`; with `feedback`, do the LoCo step in the same pass over memory.

    Args:
        x: float32, bfloat16 or float16, 1-D contiguous.
        wire: uint8, 1-D contiguous; written from each segment's ``wire_offset``.
        segments: The segments; ``state_offset`` refers to the residual.
        fmt: Codebook or uniform grid, scale rule and block size; or the dtype in which plain floats are sent, for which
            the arguments after `flag` are ignored.
        flag: int32 [1], set to 1 if any block holds inf or NaN (such a block decodes to NaN), otherwise unchanged.
        stochastic: Round up or down at random without bias; uniform grids only.
        seed: 32 bits, private to the rank and the step.
        feedback: The residual of earlier steps; None: there is none.
    """
    if not (x.dtype in _FLOATS and wire.dtype == torch.uint8 and x.device == wire.device and x.is_contiguous()):
        raise _what_is_wrong(x, wire)
    if isinstance(fmt, DenseFormat):
        backends.implementation("dense", backends.choose(x.device)).encode_(x, wire, segments, fmt, flag=flag)
        return
    if feedback is not None:
        if not 0.0 <= feedback.beta < 1.0:
            raise ValueError(f"beta must be in [0, 1), got {feedback.beta}")
        if (feedback.residual.dtype, getattr(feedback.residual_scale, "dtype", None)) not in _RESIDUALS:
            raise TypeError("the residual must be int8 with a bfloat16 residual_scale, or float32 without")
    if stochastic and not fmt.is_uniform:
        raise ValueError("stochastic rounding needs the uniform grid: leave codebook unset or use rounding='nearest'")
    backends.implementation("blocks", backends.choose(x.device)).encode_(
        x, wire, segments, fmt, stochastic=stochastic, seed=seed, flag=flag, feedback=feedback
    )


def decode_sum_(wire_WB: Tensor, out: Tensor, segments: Segments, fmt: Format, *, alpha: float = 1.0) -> None:
    """``out[segment] = alpha * sum over sources of decode(source, segment)``, added in float32 in rank order.

    Args:
        wire_WB: uint8 [W, B], one row per source, rows contiguous (``stride(1) == 1``).
        out: float32, bfloat16 or float16, 1-D contiguous; only the segments' elements are written.
        segments: The segments; ``x_offset`` is the place in `out`.
        fmt: The format of the messages.
        alpha: Factor applied to the float32 sum before the cast to `out`'s dtype; 1/W makes it a mean.
    """
    if not (
        out.dtype in _FLOATS and wire_WB.dtype == torch.uint8 and out.device == wire_WB.device and out.is_contiguous()
    ):
        raise _what_is_wrong(out, wire_WB)
    stem = "dense" if isinstance(fmt, DenseFormat) else "blocks"
    backends.implementation(stem, backends.choose(out.device)).decode_sum_(wire_WB, out, segments, fmt, alpha=alpha)
