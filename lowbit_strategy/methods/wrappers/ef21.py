"""EF21: compressed differences from an estimate that both sides keep."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from lowbit_strategy.collectives.stateful_codec import StatefulCodec
from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods._base.feedback import codec_of
from lowbit_strategy.methods._base.markov import MarkovCodec
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.wrapper import Wrapper
from lowbit_strategy.methods.quantization.efsignsgd import EFSignSGD
from lowbit_strategy.options.configuration import configuration


@configuration
class EF21(Wrapper):
    """Markov compression with the codec of any quantiser, both ways (CD-Adam's rule).

    1. every rank: ``c_r = C(g_r - ghat_r)``, ``ghat_r += c_r``; c goes to the owners
    2. owner: ``G += mean of c_r``, which keeps G the mean of all ghat
    3. DDP only: the owner sends ``C(G - gt)`` back, and all add it to gt, the result

    Once gradients change slowly differences become small, and so does the error, without a residual that lags behind.
    Rounding at random is replaced by rounding to the nearest value: C may be biased but must shrink. With C the scaled
    sign of `EFSignSGD` and AMSGrad as the optimizer this is CD-Adam.

    Args:
        compressor: Gives the codec C; feedback of its own is left out.
        exempt: Parameters that are exempt besides.

    Raises:
        ValueError: The compressor is not a quantiser.

    References:
        Richtarik, Sokolov, Fatkhullin, "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
        Feedback", 2021, arXiv 2106.05203, algorithm 2; Wang, Lin, Chen, "Communication-Compressed Adaptive Gradient
        Method for Distributed Nonconvex Optimization", 2021, arXiv 2111.00705, algorithm 1 (from the definitions).
    """

    name: ClassVar[str] = "ef21"

    compressor: Compressor = field(default_factory=EFSignSGD)

    @property
    def approaches_mean(self) -> bool:  # type: ignore[override]
        return True

    def wrap_codec(self, stateful: StatefulCodec) -> StatefulCodec:
        return MarkovCodec(codec_of(stateful).nearest())

    def wrap_reducer(self, reducer: Reducer) -> Reducer:
        raise ValueError(f"EF21 needs a quantiser (LoCo, QSGD, EFSignSGD, OneBitSGD ...), not {reducer.label!r}")
