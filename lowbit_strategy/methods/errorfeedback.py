"""Error feedback as a wrapper: the compression error is added to the next gradient."""

from __future__ import annotations

from dataclasses import field, replace
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec, DenseCodec, StatefulCodec
from lowbit_strategy.methods._base.compressor import Compressor, Wrapper
from lowbit_strategy.methods._base.feedback import (
    FeedbackCodec,
    FeedbackReducer,
    ResidualDtype,
    check_decay,
    contracting,
    contracting_reducer,
)
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class ErrorFeedback(Wrapper):
    """Adds a residual to a compressor that has none, on both hops.

    1. ``h = g + e``
    2. the wrapped compressor reduces h; the other ranks decode this rank's part as Q
    3. ``e' = decay * (h - Q)``

    Stochastic rounding is replaced by rounding to nearest: feedback removes the bias, and a code whose error can exceed
    its input, as with unbiased codes of few values, would make the residual grow without bound. Codes that do so even
    when rounding to nearest are refused.

    Args:
        compressor: One without feedback.
        decay: Below 1 old errors fade, and nothing is conserved.
        residual: ``float32`` costs 4 bytes per parameter on every rank; ``int8`` costs 1 (quantizers only).
        exempt: More exempt parameters.

    Raises:
        ValueError: A field is out of range; the compressor has feedback already, or its code does not contract.

    References:
        Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
        arXiv 1901.09847.
    """

    name: ClassVar[str] = "errorfeedback"
    approaches_mean: ClassVar[bool] = True

    compressor: Compressor = field(default_factory=lambda: QSGD(bits=3))
    decay: float = 1.0
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        check_decay(self.decay)
        Wrapper.__post_init__(self)

    def conserving(self) -> ErrorFeedback:
        return replace(self, compressor=self.compressor.conserving(), decay=1.0, residual="float32")

    def wrap_codec(self, codec: Codec) -> Codec:
        if isinstance(codec, StatefulCodec):
            raise ValueError(f"{codec.label!r} cannot be given error feedback: it has its own, or none that would help")
        if isinstance(codec, DenseCodec):
            return codec
        return FeedbackCodec(codec=contracting(codec), decay=self.decay, residual=self.residual)

    def wrap_reducer(self, reducer: Reducer) -> Reducer:
        if reducer.residual_gain is not None:
            raise ValueError(f"{reducer.label!r} has error feedback of its own: use it without the wrapper")
        if self.residual != "float32":
            raise ValueError(f"{reducer.label!r} keeps its residual in float32: leave residual='float32'")
        return FeedbackReducer(inner=contracting_reducer(reducer), decay=self.decay)
