"""The identity codec: exempt tensors ride the same messages as floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.kernels.segments import Segments

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class DenseCodec(Codec):
    """Floats as they are, or cast to bfloat16 on the wire; always summed in float32."""

    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")

    @property
    def label(self) -> str:
        return self.dtype

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    def wire_nbytes(self, numel: int) -> int:
        return numel * self.torch_dtype.itemsize

    def encode(self, x_N: Tensor, *, seed: int) -> Tensor:
        return x_N.to(self.torch_dtype).contiguous().view(torch.uint8)

    def decode_sum(self, wire_WB: Tensor, numel: int) -> Tensor:
        total = torch.zeros(numel, dtype=torch.float32, device=wire_WB.device)
        for row in wire_WB.view(self.torch_dtype):
            total += row
        return total

    def encode_segments_(self, x: Tensor, wire: Tensor, segments: Segments, *, seed: int, flag: Tensor) -> None:
        sources = [x[row.x_offset : row.x_offset + row.numel] for row in segments.rows]
        if not sources:
            return
        torch._foreach_copy_(self._views(wire, segments), sources)
        largest = torch.stack(torch._foreach_norm(sources, torch.inf))  # NaN and inf survive a maximum norm
        flag |= (~largest.isfinite().all()).to(flag.dtype)

    def decode_sum_segments_(self, wire_WB: Tensor, out: Tensor, segments: Segments, *, alpha: float) -> None:
        if not segments.rows:
            return
        totals = [part.to(torch.float32, copy=True) for part in self._views(wire_WB[0], segments)]
        for wire in wire_WB[1:]:
            torch._foreach_add_(totals, [part.float() for part in self._views(wire, segments)])
        torch._foreach_mul_(totals, alpha)
        torch._foreach_copy_([out[row.x_offset : row.x_offset + row.numel] for row in segments.rows], totals)

    def _views(self, wire: Tensor, segments: Segments) -> list[Tensor]:
        floats = wire.view(self.torch_dtype)  # wire offsets are multiples of 16 bytes
        size = self.torch_dtype.itemsize
        return [floats[row.wire_offset // size : row.wire_offset // size + row.numel] for row in segments.rows]
