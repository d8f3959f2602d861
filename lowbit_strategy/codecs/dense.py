"""The identity codec: exempt tensors ride the same messages as floats."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.segments import Segments

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DenseCodec(Codec):
    """Floats as they are, or cast to bfloat16 on the wire; always summed in float32."""

    in_one_pass: ClassVar[bool] = True

    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")

    @property
    def label(self) -> str:
        return self.dtype

    @property
    def residual_gain(self) -> float | None:
        return math.inf if self.dtype == "float32" else None

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def wire_nbytes(self, numel: int) -> int:
        return numel * _DTYPES[self.dtype].itemsize

    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        return x_N.to(_DTYPES[self.dtype]).contiguous().view(torch.uint8)

    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        total = torch.zeros(numel, dtype=torch.float32, device=wire_WB.device)
        for row in wire_WB.view(self.torch_dtype):
            total += row
        return total

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        encode_(x, wire, segments, DenseFormat(self.dtype), flag=flag)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        decode_sum_(wire_WB, out, segments, DenseFormat(self.dtype), alpha=alpha)
