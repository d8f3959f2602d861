"""How the inner optimizer's state travels: blockwise codes of what it is now, without a residual."""

from __future__ import annotations

from typing import ClassVar

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.codec_pair import CodecPair, plain_pair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


@configuration
class StateCode(Compressor):
    """Rounded to the nearest code of its block, as weights are under FSDP2.

    State is replaced by its mean, it does not add up: what an earlier round has left out is no part of it any more. Of
    second moments, which lie decades apart within a block, 4 bits leave so little that rounds of 10 steps were better
    without any averaging.

    Args:
        bits: Of a code.
        block_size: Elements that share a scale.
        high_precision_bits: Of embeddings and output heads.
        exempt, high_precision: Which parameters; see `Compressor`.
    """

    name: ClassVar[str] = "statecode"

    bits: int = 8
    block_size: int = 128
    high_precision_bits: int = 8

    def method(self, spec: TensorSpec) -> CodecPair:
        return plain_pair(BlockCodec(uniform(self.bits, self.block_size)))

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return plain_pair(BlockCodec(uniform(max(self.bits, self.high_precision_bits), self.block_size)))
