"""Error feedback in the pass that encodes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Feedback(NamedTuple):
    """LoCo's residual, with `beta` of 0 the classic one, and how the pass that encodes updates it.

    For each block, all in float32:

    1. ``h = g + e``, with ``e`` the dequantized residual (0 if `reset`)
    2. codes and scale of ``h`` in the given format, packed; ``Q`` is what they decode to
    3. ``e' = beta * e + (1 - beta) * (h - Q)``, stored as int8 with one absmax scale per block

    A block whose gradient is all zero is idle: it sends zeros and keeps its residual, so that an idle expert's feedback
    is not used up in a step whose result is not used. A block with inf or NaN in ``h`` sends NaN and keeps its
    residual.

    Args:
        residual: int8 with `residual_scale`, or float32 without it; 1-D, whole blocks. Updated in place.
        residual_scale: bfloat16, one per block of `residual`. Updated in place.
        beta: Weight of the old error, in [0, 1).
        reset: Set the residual to zero before this step.
        stochastic: Round the int8 residual at random, so that increments below half a step are not lost.

    References:
        Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", 2024, arXiv 2407.04480.
    """

    residual: Tensor
    residual_scale: Tensor | None
    beta: float
    reset: bool = False
    stochastic: bool = False
