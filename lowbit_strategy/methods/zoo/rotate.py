"""Rotate: rotates blocks before they are coded."""

from __future__ import annotations

from dataclasses import field, replace
from typing import ClassVar

from lowbit_strategy.codecs.base import Codec, DenseCodec, StatefulCodec
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.loco import LoCoCodec
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.zoo.ef21 import MarkovCodec
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec
from lowbit_strategy.methods.zoo.rotated import RotatedCodec
from lowbit_strategy.methods.zoo.wrapper import Wrapper
from lowbit_strategy.options.configuration import configuration


@configuration
class Rotate(Wrapper):
    """Rotates blocks before they are coded, and back after the ranks' values have been added.

    1. ``y = H D x / sqrt(n)`` for every n = `size` elements, H the Hadamard matrix, D fixed random signs
    2. the wrapped compressor works on y
    3. the sum over ranks is rotated back

    Outliers are spread over their block, so an even grid wastes fewer values, and blocks look more like the Gaussian
    that fitted codebooks are made for: on real gradients the relative error of a fitted code falls from 0.42 to 0.35 at
    1 bit, and from 0.150 to 0.108 at 2 bits. Residuals are not rotated. LoCo then runs without its fused kernel, and
    without resets.

    Args:
        compressor: A quantizer.
        size: Elements rotated together, a power of two that divides the block size; None: the block size.

    Raises:
        ValueError: `size` does not fit; the compressor is not a quantizer.

    References:
        SDP4Bit, 2024, arXiv 2410.15526, section 3.3 (32 elements, no random signs); Suresh et al., 2017,
        arXiv 1611.00429, section 3 (random signs).
    """

    name: ClassVar[str] = "rotate"

    compressor: Compressor = field(default_factory=QSGD)
    size: int | None = None

    def wrap_codec(self, codec: Codec) -> Codec:
        if isinstance(codec, LoCoCodec):
            return FeedbackCodec(codec=self._rotated(codec.codec), beta=codec.beta, residual=codec.residual)
        if isinstance(codec, (FeedbackCodec, MarkovCodec)):
            return replace(codec, codec=self._rotated(codec.codec))
        if not isinstance(codec, StatefulCodec):
            return self._rotated(codec)
        raise ValueError(f"{codec.label!r} cannot be rotated: wrap a quantizer such as QSGD or LoCo")

    def _rotated(self, codec: Codec) -> Codec:
        return codec if isinstance(codec, DenseCodec) else RotatedCodec(codec, self.size)

    def wrap_reducer(self, reducer: Reducer) -> Reducer:
        raise ValueError(f"Rotate needs a quantizer (QSGD, LoCo, EFSignSGD ...), not {reducer.label!r}")
