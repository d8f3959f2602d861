"""The parameters whose second moment is corrected, and the codec of squared gradients."""

from __future__ import annotations

from collections.abc import Mapping

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import DENSE, Assignment

SKETCH_NUMEL, NUM_SUMS = 64, 3  # numbers per parameter
ROOTS = CodecPair(BlockCodec(uniform(4, 128)))  # how roots of squares are sent


def served(assignments: Mapping[str, Assignment]) -> list[str]:
    """Parameters whose gradients have few bits; for others the optimizer's second moment needs no correction."""
    return [name for name, each in assignments.items() if each.kind == "compressed" and each.method != DENSE]
