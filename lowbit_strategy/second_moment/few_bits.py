"""Whether codes have so few bits that Adam's second moment needs a correction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowbit_strategy.codecs.base import Codec, StatefulCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all

FEW_BITS = 3  # codes of one and two bits, and ternary ones, have fewer
_LATE = 1 << 20  # in steps: after any warm-up


def few_bits(assignments: Mapping[str, Assignment]) -> bool:
    """Whether there are codes whose noise costs an optimizer of Adam's kind steps, since its square adds to the second
    moment. Measured for codes of two bits or fewer with residuals; codes without residuals do not need it.
    """
    uplinks = [each.method.uplink for each in assignments.values() if isinstance(each.method, CodecPair)]
    return any(
        _is_coarse(uplink.codec) and not uplink.arenas().keys().isdisjoint(("residual", "estimate"))
        for uplink in uplinks
        if isinstance(uplink, StatefulCodec)
    )


def _is_coarse(codec: Codec) -> bool:
    """Whether a value that is sent has fewer than `FEW_BITS` bits, including its share of scales."""
    while (inner := getattr(codec, "values", None) or getattr(codec, "codec", None)) is not None:
        codec = inner  # the codec inside a rotation, or of chosen elements' values
    numel = 64 * codec.block_size
    return 8 * codec.wire_nbytes(numel) < FEW_BITS * numel


def needs_squares(compressor: Compressor, specs: Sequence[TensorSpec]) -> bool:
    """Whether a compressor has few bits, at its start or after its last phase."""
    return any(few_bits(assign_all(compressor.phase(step), specs)) for step in (0, _LATE))
