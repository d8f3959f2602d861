"""EF21: compressed differences from an estimate that sender and receiver share."""

from __future__ import annotations

from dataclasses import field, replace
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.methods._base.compressor import Compressor, Wrapper
from lowbit_strategy.methods._base.feedback import MarkovCodec, contracting
from lowbit_strategy.methods._base.method import CodecPair, Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.zoo.efsignsgd import EFSignSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class EF21(Wrapper):
    """Markov compression with the codec of any quantizer, on both hops (CD-Adam's rule).

    1. every rank: ``v_r = momentum * v_r + (1 - momentum) * g_r``; ``c_r = C(v_r - ghat_r)``, ``ghat_r += c_r``; c goes
       to the owners
    2. owner: ``G += mean of c_r``, so G is the mean of all ghat
    3. DDP only: the owner sends ``C(G - gt)`` back, and all ranks add it to gt, the result

    When v changes slowly, differences and errors become small, without a residual's lag. Without momentum v is the
    gradient, and with small batches its noise keeps the differences large. Stochastic rounding is replaced by rounding
    to nearest: C may be biased but must contract. With the scaled sign of `EFSignSGD` as C, and AMSGrad, this is
    CD-Adam.

    Memory under DDP: 8 bytes per parameter on every rank (12 with momentum), and 8 more per owned parameter.

    Args:
        compressor: Gives the codec C; its own feedback is removed.
        momentum: Weight of the old average in v, in [0, 1); 0: no average. Larger: less noise, more delay. The
            optimizer should have no momentum then.
        exempt: More exempt parameters.

    Raises:
        ValueError: A field is out of range; the compressor is not a quantizer, or its code does not contract.

    References:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
        Feedback", 2021, arXiv 2106.05203, algorithm 2; with momentum: Fatkhullin, Tyurin, Richtarik, "Momentum Provably
        Improves Error Feedback!", 2023, arXiv 2305.15155; Wang, Lin, Chen, "Communication-Compressed Adaptive Gradient
        Method for Distributed Nonconvex Optimization", 2021, arXiv 2111.00705, algorithm 1 (from the definitions).
    """

    name: ClassVar[str] = "ef21"
    approaches_mean: ClassVar[bool] = True

    compressor: Compressor = field(default_factory=EFSignSGD)
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        Wrapper.__post_init__(self)

    def wrap(self, method: Method) -> Method:
        wrapped = Wrapper.wrap(self, method)
        if isinstance(wrapped, CodecPair) and isinstance(wrapped.uplink, MarkovCodec):  # gradients, not their mean
            return replace(wrapped, uplink=replace(wrapped.uplink, momentum=self.momentum))
        return wrapped

    def wrap_codec(self, codec: Codec) -> Codec:
        return MarkovCodec(contracting(codec.stateless()))

    def wrap_reducer(self, reducer: Reducer) -> Reducer:
        raise ValueError(f"EF21 needs a quantizer (LoCo, QSGD, EFSignSGD, OneBitSGD ...), not {reducer.label!r}")
