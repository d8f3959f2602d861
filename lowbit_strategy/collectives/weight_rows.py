"""Converts a row of a module's weights into a message, and messages into rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext
from lowbit_strategy.collectives.exchange import HEADER_NBYTES, layout_header
from lowbit_strategy.collectives.layout import ALIGNMENT, ParamView, round_up
from lowbit_strategy.kernels.segments import Segment, Segments, segment_views


class CodecParams(NamedTuple):
    """Parameters of a row that share a codec; None: they are sent uncoded."""

    codec: Codec | None
    params: tuple[ParamView, ...]


class RowCode:
    """Converts rows of one layout and dtype into messages and back.

    Args:
        parts: The parameters of each codec; a parameter's `row_stride` is the length of a row.
        dtype: The rows' dtype.
        rank, device: This process's rank and device.
    """

    def __init__(self, parts: Sequence[CodecParams], dtype: torch.dtype, rank: int, device: torch.device) -> None:
        self.dtype = dtype
        self.nbytes = HEADER_NBYTES + sum(
            self._section_nbytes(codec, param) for codec, params in parts for param in params
        )
        # segments encoded from this row, and decoded from all rows
        self._coded: list[tuple[Codec, Segments, Segments]] = []
        self._exact = Segments([]), Segments([])
        wire_at = HEADER_NBYTES
        for codec, params in parts:
            encode, decode = [], []
            for param in params:
                if length := param.row_length(rank):
                    encode.append(Segment(param.offset, length, 0, wire_at))
                decode += param.segments(wire_at, self.nbytes)
                wire_at += self._section_nbytes(codec, param)
            if codec is None:
                self._exact = self._joined(encode), self._joined(decode)
            else:
                self._coded.append((codec, Segments(encode), Segments(decode)))
        layout = [(codec, [param.common_layout() for param in params]) for codec, params in parts]
        self.header = layout_header(repr((layout, dtype)).encode(), device)
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)  # kernels note inf and NaN here; it is not read

    def _section_nbytes(self, codec: Codec | None, param: ParamView) -> int:
        numel = param.row_numel
        return round_up(numel * self.dtype.itemsize if codec is None else codec.wire_nbytes(numel), ALIGNMENT)

    def _joined(self, rows: list[Segment]) -> Segments:
        """Join exempt parameters that are adjacent in the row and in the message, so that they are copied together."""
        joined: list[Segment] = []
        for row in sorted(rows):
            last = joined[-1] if joined else None
            if (
                last is not None
                and row.x_offset == last.x_offset + last.numel
                and row.wire_offset == last.wire_offset + last.numel * self.dtype.itemsize
            ):
                joined[-1] = last._replace(numel=last.numel + row.numel)
            else:
                joined.append(row)
        return Segments(joined)

    def encode_(self, x_N: Tensor, coded_N: Tensor, wire_B: Tensor) -> None:
        """Write the message of one row: exempt parameters of `x_N`, the codes of `coded_N`."""
        wire_B[:HEADER_NBYTES] = self.header
        for codec, encode, _ in self._coded:
            if encode.rows:
                codec.encode_(coded_N, wire_B, encode, {}, StepContext(0, 0, 0), self._flag)
        encode, _ = self._exact
        if encode.rows:
            torch._foreach_copy_(self._values(wire_B, encode), segment_views(x_N, encode, "x_offset"))

    def decode_(self, wires_WB: Tensor, out: Tensor) -> None:
        """Decode the coded parameters of all rows' messages into `out`, ``[W * N]``; the rest is unchanged."""
        for codec, _, decode in self._coded:
            if decode.rows:
                codec.decode_sum_(wires_WB.view(1, -1), out, decode, {}, 1.0)

    def decode_exact_(self, wires_WB: Tensor, out: Tensor) -> None:
        """Copy the exempt parameters of all rows' messages into `out`."""
        _, decode = self._exact
        if decode.rows:
            torch._foreach_copy_(segment_views(out, decode, "x_offset"), self._values(wires_WB.view(-1), decode))

    def _values(self, wire: Tensor, segments: Segments) -> list[Tensor]:
        return segment_views(wire.view(self.dtype), segments, "wire_offset", self.dtype.itemsize)
