"""Codecs for the values that sparse methods send, by name."""

from __future__ import annotations

from typing import Literal

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform

Values = Literal["float32", "bfloat16", "int8", "int7", "int6", "int5", "int4", "int3", "int2"]
_CODECS: dict[str, Codec] = {
    "float32": DenseCodec("float32"),
    "bfloat16": DenseCodec("bfloat16"),
    **{f"int{bits}": BlockCodec(uniform(bits, 128 if bits == 8 else 64)) for bits in range(2, 9)},
}


def value_codec(values: str | Codec) -> Codec:
    """The codec for sparse values.

    Raises:
        ValueError: `values` is neither a codec nor the name of one.
    """
    if isinstance(values, Codec):
        return values
    if values not in _CODECS:
        raise ValueError(f"values must be one of {', '.join(_CODECS)} or a Codec, got {values!r}")
    return _CODECS[values]
