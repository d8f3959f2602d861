"""What codes gradients inside a node."""

from __future__ import annotations

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform

_BLOCK_SIZE = 128  # LoCo's


def node_codec(bits: int, *, exact: bool) -> Codec:
    """What codes a parameter inside a node, where gradients travel there as codes."""
    return DenseCodec() if exact else BlockCodec(uniform(bits, _BLOCK_SIZE))
