"""Base classes for your own compressor, and `register_compressor`, which gives it its names.

See the pages "Write a compressor" and "Architecture".
"""

from typing import TYPE_CHECKING, Any

from lowbit_strategy import leaves
from lowbit_strategy.codecs.base import Codec, StatefulCodec, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import ordered_nbytes, sum_ordered
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor, TwoPrecisionCompressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.register import register_compressor

if TYPE_CHECKING:
    from lowbit_strategy.methods.zoo.contraction import contracts as contracts
    from lowbit_strategy.methods.zoo.feedback import FeedbackCodec as FeedbackCodec

_ZOO = {
    "FeedbackCodec": "lowbit_strategy.methods.zoo.feedback:FeedbackCodec",
    "contracts": "lowbit_strategy.methods.zoo.contraction:contracts",
}
__all__ = [
    "Codec",
    "CodecPair",
    "Comm",
    "Compressor",
    "FeedbackCodec",
    "Method",
    "ParamView",
    "Pending",
    "Reducer",
    "StatefulCodec",
    "StepContext",
    "TensorSpec",
    "TwoPrecisionCompressor",
    "configuration",
    "contracts",
    "ordered_nbytes",
    "register_compressor",
    "sum_ordered",
]


def __getattr__(name: str) -> Any:
    if name not in _ZOO:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return leaves.load(_ZOO[name], name)
