"""Dense: uncompressed gradients."""

from __future__ import annotations

from typing import ClassVar, Literal

from lowbit_strategy.codecs.base import DenseCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.selectors import Selector
from lowbit_strategy.options.configuration import configuration


@configuration
class Dense(Compressor):
    """Gradients as floats, summed in float32 in rank order.

    Args:
        dtype: Dtype on the wire. ``bfloat16`` halves the bytes and rounds each contribution once.
    """

    name: ClassVar[str] = "dense"

    dtype: Literal["float32", "bfloat16"] = "float32"
    exempt: tuple[Selector, ...] = ()

    def method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(DenseCodec(self.dtype))
