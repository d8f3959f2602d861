"""Base classes for your own compressor, and `register_compressor`, which gives it its names.

See the pages "Write a compressor" and "Architecture".
"""

from lowbit_strategy.codecs.base import Codec, StatefulCodec, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import ordered_nbytes, sum_ordered
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor, TwoPrecisionCompressor
from lowbit_strategy.methods._base.feedback import FeedbackCodec
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.options.configuration import configuration
from lowbit_strategy.register import register_compressor

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
    "ordered_nbytes",
    "register_compressor",
    "sum_ordered",
]
