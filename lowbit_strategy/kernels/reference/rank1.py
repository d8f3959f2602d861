"""Matrices with scales of rows times columns, in plain PyTorch on any device: the definition of their bytes.

Messages with equally many rows are stacked, so that a bucket takes few operations. Legend: ``_SN`` S messages of N
elements; ``_SKB`` of K rows with B columns; ``_KB`` all their rows, with ``_K`` one number per row.

Scales of this form: Shazeer, Stern, "Adafactor", 2018, arXiv 1804.04235, section 3. There both are means of the matrix;
here those of rows are taken once columns are divided by theirs, so that any rule for the scale of a block serves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.kernels.format import SCALE_NBYTES, Rank1Format
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, RESIDUAL_STREAM, dither_at, stream_keys
from lowbit_strategy.kernels.segments import Segment, Segments, pieces_of

_FLT_MIN = torch.finfo(torch.float32).tiny


class Codes(NamedTuple):
    """What a stack of messages says.

    Args:
        codes_KB: uint8.
        row_K: Scale of each row, float32 holding bfloat16 values; NaN for a row that is not finite.
        column_SB: Scale of each column of each message, likewise, at most 1.
    """

    codes_KB: Tensor
    row_K: Tensor
    column_SB: Tensor


def column_scales(h_SKB: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [S, B] holding bfloat16 values: each column's sum of magnitudes over the largest column's, rounded up.

    And whether none of a message's sums is infinite, boolean [S]; if one is, its scales are zero.

    Rows are added neighbour by neighbour, then pairs of them, and so on: every backend adds in this order.
    """
    total_SKB = h_SKB.abs()
    while total_SKB.shape[1] > 1:
        if total_SKB.shape[1] % 2:
            total_SKB = torch.nn.functional.pad(total_SKB, (0, 0, 0, 1))
        total_SKB = total_SKB[:, 0::2] + total_SKB[:, 1::2]
    total_SB = total_SKB[:, 0]
    largest_S1 = total_SB.amax(1, keepdim=True)
    usable_S1 = (largest_S1 > 0) & largest_S1.isfinite()
    scale_SB = blocks.round_up_bfloat16(torch.where(usable_S1, total_SB / largest_S1, 0.0))
    return torch.where(scale_SB < _FLT_MIN, 0.0, scale_SB), ~largest_S1.isinf()[:, 0]


def quantize(h_KB: Tensor, idle_K: Tensor | None, num: int, fmt: Rank1Format, noise: Tensor | float) -> Codes:
    """`num` messages, whose rows are `h_KB`, as codes.

    1. ``c_j = sum_i |h_ij| / max_j sum_i |h_ij|``, rounded up to bfloat16
    2. ``y_ij = h_ij / c_j``, zero in a column of zeros
    3. ``r_i``: the scale of row i of y by the rule of the format, rounded up to bfloat16
    4. the code of ``y_ij / r_i``

    Where ``|h_ij| = a_i b_j``, y has rows of one magnitude, so ``r_i c_j`` is in proportion to that of the element,
    but for the rounding of scales. With ``absmax`` nothing is clipped. Idle rows and rows with inf or NaN count for
    zero in 1. A message with an infinite sum in 1 is not finite as a whole.
    """
    finite_K = h_KB.isfinite().all(-1)
    used_KB = torch.where((finite_K if idle_K is None else finite_K & ~idle_K)[:, None], h_KB, 0.0)
    used_SKB = used_KB.view(num, -1, fmt.columns)
    column_SB, bounded_S = column_scales(used_SKB)
    finite_K = finite_K & bounded_S.repeat_interleave(used_SKB.shape[1], output_size=finite_K.shape[0])
    inverse_SB = torch.where(column_SB > 0, 1.0 / column_SB, 0.0)
    y_KB = (used_SKB * inverse_SB[:, None]).view_as(h_KB)
    row_K = blocks.round_up_bfloat16(blocks.raw_scale(y_KB, _count(fmt.columns), fmt.codes))
    row_K = torch.where(row_K < _FLT_MIN, 0.0, row_K)
    row_K = torch.where(finite_K & (row_K <= fmt.codes.max_scale), row_K, torch.nan)
    return Codes(blocks.quantize(y_KB, row_K, fmt.codes, noise), row_K, column_SB)


def dequantize(message: Codes, fmt: Rank1Format) -> Tensor:
    """float32 [K, B]: ``(value * row_scale) * column_scale``, of which the first product is exact."""
    codes = fmt.codes
    if codes.codebook is None:
        values_KB = message.codes_KB.float() - codes.qmax
    else:
        values_KB = _table(codes.codebook, message.codes_KB.device)[message.codes_KB.int()]
    rows_KB = values_KB * message.row_K[:, None]
    num, columns = message.column_SB.shape
    return (rows_KB.view(num, -1, columns) * message.column_SB[:, None]).view_as(rows_KB)


def to_bytes(message: Codes, fmt: Rank1Format) -> Tensor:
    """uint8 [S, wire_nbytes]."""
    num = message.column_SB.shape[0]
    codes_SN = message.codes_KB.view(num, -1)
    padded = torch.nn.functional.pad(
        codes_SN, (0, -codes_SN.shape[1] % fmt.codes.block_size), value=fmt.codes.zero_code
    )
    packed = blocks.pack(padded.view(-1, fmt.codes.block_size), fmt.codes).view(num, -1)
    rows, columns = (
        blocks.to_bfloat16(scale.view(num, -1)).view(torch.uint8) for scale in (message.row_K, message.column_SB)
    )
    return torch.cat([packed, rows, columns], 1)


def from_bytes(wire_SB: Tensor, numel: int, fmt: Rank1Format) -> Codes:
    """The inverse of `to_bytes` for messages of `numel` elements."""
    num, rows = wire_SB.shape[0], fmt.num_blocks(numel)
    sizes = [fmt.codes.num_blocks(numel) * fmt.codes.code_nbytes, SCALE_NBYTES * rows, SCALE_NBYTES * fmt.columns]
    packed, row, column = wire_SB.split_with_sizes(sizes, 1)
    codes = blocks.unpack(packed.reshape(-1, fmt.codes.code_nbytes), fmt.codes).reshape(num, -1)[:, :numel]
    row_K, column_SB = (
        part.clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float() for part in (row, column)
    )
    return Codes(codes.reshape(-1, fmt.columns), row_K.view(-1), column_SB)


class Stack:
    """Messages of the same size, and where their parts lie.

    Attributes:
        segments: The messages.
        numel: Elements of each.
    """

    def __init__(self, rows: Sequence[Segment], numel: int, fmt: Rank1Format) -> None:
        self.segments, self.numel = Segments(rows), numel
        self._wire = Segments(row._replace(x_offset=row.wire_offset, numel=fmt.wire_nbytes(numel)) for row in rows)
        self._state = Segments(row._replace(x_offset=row.state_offset) for row in rows)
        per_row = (row.state_offset // fmt.columns for row in rows)
        self._scales = Segments(
            row._replace(x_offset=at, numel=numel // fmt.columns) for row, at in zip(rows, per_row, strict=True)
        )

    def values(self, x: Tensor) -> list[Tensor]:
        return pieces_of(x, self.segments, "x_offset")

    def messages(self, wire: Tensor) -> list[Tensor]:
        return pieces_of(wire, self._wire, "x_offset")

    def state(self, residual: Tensor) -> list[Tensor]:
        return pieces_of(residual, self._state, "x_offset")

    def scales(self, residual_scale: Tensor) -> list[Tensor]:
        return pieces_of(residual_scale, self._scales, "x_offset")

    def noise(self, seed: int, stream: int, like_KB: Tensor) -> Tensor:
        """float32 [K, B] in [-0.5, 0.5): each message's own numbers, whatever the bucket."""
        salt_S = self.segments.to(like_KB.device)[:, 4]
        index_N = torch.arange(self.numel, device=like_KB.device)
        return dither_at(index_N, stream_keys(seed, salt_S, stream)[:, None]).view_as(like_KB)


def stacks(segments: Segments, fmt: Rank1Format, max_elements: int) -> list[Stack]:
    """The messages in stacks of at most `max_elements` elements, or of one message; made once per table."""
    key = ("rank1", fmt, max_elements)
    if key not in segments.cache:
        found: list[Stack] = []
        by_size: dict[int, list[Segment]] = {}
        for row in segments.rows:
            by_size.setdefault(row.numel, []).append(row)
        for numel, rows in by_size.items():
            step = max(1, max_elements // max(numel, 1))
            found += [Stack(rows[at : at + step], numel, fmt) for at in range(0, len(rows), step) if numel]
        segments.cache[key] = found
    return segments.cache[key]  # type: ignore[return-value]


def encode_(
    x: Tensor,
    wire: Tensor,
    segments: Segments,
    fmt: Rank1Format,
    *,
    stochastic: bool,
    seed: int,
    flag: Tensor,
    max_elements: int = blocks.WHOLE,
) -> None:
    for stack in stacks(segments, fmt, max_elements):
        h_KB = torch.cat(stack.values(x)).float().view(-1, fmt.columns)
        noise = stack.noise(seed, CODE_STREAM, h_KB) if stochastic else 0.0
        message = quantize(h_KB, None, len(stack.segments), fmt, noise)
        _store_(stack.messages(wire), to_bytes(message, fmt))
        flag |= message.row_K.isnan().any().to(flag.dtype)


def decode_sum_(
    wire_WB: Tensor,
    out: Tensor,
    segments: Segments,
    fmt: Rank1Format,
    *,
    alpha: float,
    max_elements: int = blocks.WHOLE,
) -> None:
    for stack in stacks(segments, fmt, max_elements):
        total_KB = torch.zeros(1, dtype=torch.float32, device=out.device)
        together = max(1, max_elements // (stack.numel * len(stack.segments)))
        for sources in wire_WB.split(together):
            wire_SB = torch.stack([message for source in sources for message in stack.messages(source)])
            for values_KB in dequantize(from_bytes(wire_SB, stack.numel, fmt), fmt).chunk(len(sources)):
                total_KB = total_KB + values_KB  # rank order, float32: the same bits wherever it is computed
        _store_(stack.values(out), total_KB * alpha)


def loco_encode_(
    x: Tensor,
    residual: Tensor,
    residual_scale: Tensor | None,
    wire: Tensor,
    segments: Segments,
    fmt: Rank1Format,
    *,
    beta: float,
    reset: bool,
    stochastic: bool,
    stochastic_residual: bool,
    seed: int,
    flag: Tensor,
    max_elements: int = blocks.WHOLE,
) -> None:
    """As `reference.loco.loco_encode_`, a row being a block. An int8 residual has one scale per row."""
    beta_old = torch.tensor(beta, dtype=torch.float32)
    beta_new = torch.tensor(1.0 - beta, dtype=torch.float32)
    for stack in stacks(segments, fmt, max_elements):
        state = stack.state(residual)
        scales = [] if residual_scale is None else stack.scales(residual_scale)
        if reset:
            torch._foreach_zero_([*state, *scales])
        g_KB = torch.cat(stack.values(x)).float().view(-1, fmt.columns)
        q_KB = torch.cat(state).view_as(g_KB)
        e_KB = q_KB.float()
        if scales:
            old_K = torch.cat(scales)
            e_KB = e_KB * old_K.float()[:, None]
        h_KB = g_KB + e_KB
        idle_K = (g_KB == 0).all(-1)  # an idle expert's residual waits for its next gradient
        noise = stack.noise(seed, CODE_STREAM, h_KB) if stochastic else 0.0
        message = quantize(h_KB, idle_K, len(stack.segments), fmt, noise)
        bad_K = message.row_K.isnan()
        _store_(stack.messages(wire), to_bytes(message, fmt))
        flag |= bad_K.any().to(flag.dtype)

        updated_KB = beta_old * e_KB + beta_new * (h_KB - dequantize(message, fmt))
        keep_K = idle_K | bad_K
        if residual_scale is None:
            _store_(state, torch.where(keep_K[:, None], e_KB, updated_KB))
            continue
        noise = stack.noise(seed, RESIDUAL_STREAM, h_KB) if stochastic_residual else 0.0
        new_KB, new_K = blocks.quantize_residual(updated_KB, noise)
        _store_(state, torch.where(keep_K[:, None], q_KB, new_KB))
        _store_(scales, torch.where(keep_K, old_K, blocks.to_bfloat16(new_K)))


@functools.lru_cache
def _count(columns: int) -> Tensor:
    return torch.tensor(columns)  # a number to kernels of any device


@functools.lru_cache
def _table(codebook: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(codebook, dtype=torch.float32).to(device)


def _store_(targets: Sequence[Tensor], values: Tensor) -> None:
    torch._foreach_copy_(list(targets), list(values.reshape(len(targets), -1).unbind()))
