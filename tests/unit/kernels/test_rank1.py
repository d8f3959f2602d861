"""Scales of rows times columns: the bytes of a matrix, by their definition and by what they must decode to."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.codebooks import fitted, ternary, unit_gain
from lowbit_strategy.kernels.format import BlockFormat, Rank1Format, uniform
from lowbit_strategy.kernels.loco import loco_encode_
from lowbit_strategy.kernels.reference import rank1
from lowbit_strategy.kernels.segments import Segment, Segments

CODES: dict[str, BlockFormat] = {
    "unit gain, 1 bit": unit_gain(2, 32),
    "unit gain, 2 bits": unit_gain(4, 64),
    "unit gain, 3 bits": unit_gain(8, 128),
    "unit gain, trits": unit_gain(3, 64),
    "fitted, 4 bits": fitted(4, 64),
    "trits": ternary(32),
    "signs at the mean": BlockFormat(bits=1, block_size=32, scale_rule="mean_abs", codebook=(-1.0, 1.0)),
    "uniform, 4 bits": uniform(4, 128),
    "uniform, 8 bits": uniform(8, 32),
}
ROUNDING = 2.0**-7  # a scale is rounded up to bfloat16, by less than this share of it
shapes = st.tuples(st.integers(1, 40), st.integers(1, 90))


def rank1_magnitudes(shape: tuple[int, int], seed: int, decades: float = 1.0) -> Tensor:
    """float32 [R, C]: random signs on an outer product whose factors span some decades."""
    generator = torch.Generator().manual_seed(seed)
    a, b = (10.0 ** (decades * torch.randn(n, generator=generator)) for n in shape)
    return torch.outer(a, b) * (1.0 - 2.0 * torch.randint(0, 2, shape, generator=generator))


def decoded(fmt: Rank1Format, x: Tensor) -> Tensor:
    codec = BlockCodec(fmt)
    return codec.decode_sum(codec.encode(x.reshape(-1), seed=0)[None], x.numel()).view(x.shape)


def outermost_sent(codes: BlockFormat) -> float:
    """What a magnitude that fills its row is sent as, in units of itself."""
    if codes.codebook is None:
        return 1.0
    return codes.codebook[sum(threshold < 1.0 for threshold in codes.thresholds)]


@pytest.mark.parametrize("name", CODES)
@given(shape=shapes, seed=st.integers(0, 99))
def test_magnitudes_of_rank_one_are_met_exactly(name: str, shape: tuple[int, int], seed: int) -> None:
    """Up to the rounding of scales, and by the uniform grid up to half a step: whatever rows and columns are."""
    codes = CODES[name]
    x = rank1_magnitudes(shape, seed)
    ratio = (decoded(Rank1Format(codes=codes, columns=shape[1]), x) / x).double()
    step = 0.5 / codes.qmax if codes.is_uniform else 0.0
    assert float((ratio / outermost_sent(codes) - 1.0).abs().max()) <= 2.1 * ROUNDING + step


@pytest.mark.parametrize("name", CODES)
def test_the_definition_element_by_element(name: str) -> None:
    """Against a transcription in float64 with loops: what is sent is the nearest value, or next to a threshold."""
    codes, (rows, columns) = CODES[name], (13, 41)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)) * rank1_magnitudes((rows, columns), 4)
    totals = x.double().abs().sum(0)
    shares = [_bfloat16_not_below(float(total / totals.max())) for total in totals]
    sent = decoded(Rank1Format(codes=codes, columns=columns), x)
    for i in range(rows):
        y = [float(x[i, j]) / shares[j] for j in range(columns)]
        scale = _bfloat16_not_below(_scale(y, codes))
        for j in range(columns):
            value = float(sent[i, j]) / (scale * shares[j])
            low, high = ((y[j] / scale) * (1 - 1e-5), (y[j] / scale) * (1 + 1e-5))
            assert min(abs(value - _nearest(low, codes)), abs(value - _nearest(high, codes))) < 1e-4


def _bfloat16_not_below(value: float) -> float:
    rounded = torch.tensor(value, dtype=torch.float32).to(torch.bfloat16)
    if float(rounded) < value * (1 - 1e-7):
        rounded = torch.nextafter(rounded, torch.tensor(math.inf, dtype=torch.bfloat16))
    return float(rounded)


def _scale(y: list[float], codes: BlockFormat) -> float:
    magnitudes = [abs(value) for value in y]
    mean = sum(magnitudes) / len(y)
    match codes.scale_rule:
        case "absmax":
            return max(magnitudes) / codes.qmax
        case "rms":
            return math.sqrt(sum(value * value for value in y) / len(y))
        case "mean_abs":
            return mean
    above = [value for value in magnitudes if value > 0.7 * mean]
    return sum(above) / len(above)


def _nearest(y: float, codes: BlockFormat) -> float:
    if codes.codebook is None:
        return float(round(y))
    return codes.codebook[sum(y > threshold for threshold in codes.thresholds)]


@pytest.mark.parametrize("name", CODES)
@given(shape=shapes)
def test_a_message_has_its_codes_and_one_scale_for_each_row_and_column(name: str, shape: tuple[int, int]) -> None:
    codes, (rows, columns) = CODES[name], shape
    fmt = Rank1Format(codes=codes, columns=columns)
    blocks = -(-rows * columns // codes.block_size)
    wire = BlockCodec(fmt).encode(torch.randn(rows * columns), seed=0)
    assert wire.numel() == fmt.wire_nbytes(rows * columns) == blocks * codes.code_nbytes + 2 * (rows + columns)
    assert fmt.wire_nbytes(0) == 0


def test_bits_per_element_of_a_large_matrix() -> None:
    fmt = Rank1Format(codes=unit_gain(2, 32), columns=768)
    assert 8 * fmt.wire_nbytes(256 * 768) / (256 * 768) == 1 + 16 * (256 + 768) / (256 * 768)


def test_a_message_of_part_of_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="whole rows of 10 elements, got 25"):
        Rank1Format(codes=uniform(4, 32), columns=10).wire_nbytes(25)
    with pytest.raises(ValueError, match="columns must be a positive integer"):
        Rank1Format(codes=uniform(4, 32), columns=0)


class Bucket:
    """Messages of several sizes in one buffer, with residuals in arenas."""

    def __init__(self, fmt: Rank1Format, rows: tuple[int, ...], residual: torch.dtype = torch.float32) -> None:
        self.fmt, places = fmt, []
        x_at, state_at, wire_at = 3, fmt.columns, 16
        for i, num in enumerate(rows):
            numel = num * fmt.columns
            places.append(Segment(x_at, numel, state_at, wire_at, 100 + i))
            x_at += numel + i % 3
            state_at += numel
            wire_at += -(-fmt.wire_nbytes(numel) // 16) * 16 + 16
        self.segments = Segments(places)
        self.numel, self.wire = x_at, torch.full((wire_at,), 0xA5, dtype=torch.uint8)
        self.residual = torch.zeros(state_at, dtype=residual)
        self.scale = None if residual == torch.float32 else torch.zeros(state_at // fmt.columns, dtype=torch.bfloat16)
        self.flag = torch.zeros(1, dtype=torch.int32)

    def pieces(self, x: Tensor) -> list[Tensor]:
        return [x[row.x_offset : row.x_offset + row.numel].view(-1, self.fmt.columns) for row in self.segments.rows]

    def residuals(self) -> list[Tensor]:
        values = self.residual.float().view(-1, self.fmt.columns)
        values = values if self.scale is None else values * self.scale.float()[:, None]
        return [values.view(-1)[r.state_offset :][: r.numel].view(-1, self.fmt.columns) for r in self.segments.rows]

    def loco(self, x: Tensor, beta: float = 0.0, **options: bool) -> list[Tensor]:
        """One step of LoCo: what each message decodes to."""
        loco_encode_(
            x, self.residual, self.scale, self.wire, self.segments, self.fmt, beta=beta, flag=self.flag, **options
        )
        out = torch.full((self.numel,), 7.0)
        decode_sum_(self.wire[None], out, self.segments, self.fmt)
        return self.pieces(out)


ROWS = (5, 1, 12, 5, 0, 5)


def values(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(numel, generator=generator) * 10 ** torch.randn(numel, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CODES)
def test_each_message_decodes_alone_and_whatever_it_is_stacked_with(name: str, dtype: torch.dtype) -> None:
    fmt = Rank1Format(codes=CODES[name], columns=23)
    bucket = Bucket(fmt, ROWS)
    x = values(bucket.numel, dtype=dtype)
    encode_(x, bucket.wire, bucket.segments, fmt, flag=bucket.flag)
    out = torch.full((bucket.numel,), 7.0)
    decode_sum_(bucket.wire[None], out, bucket.segments, fmt)
    for row, piece, own in zip(bucket.segments.rows, bucket.pieces(out), bucket.pieces(x), strict=True):
        message = bucket.wire[row.wire_offset :][: fmt.wire_nbytes(row.numel)].clone()
        if row.numel:
            assert torch.equal(message, BlockCodec(fmt).encode(own.reshape(-1), seed=0))
            assert torch.equal(piece.reshape(-1), BlockCodec(fmt).decode_sum(message[None], row.numel))
    untouched = Bucket(fmt, ROWS).wire
    for row in bucket.segments.rows:
        untouched[row.wire_offset :][: fmt.wire_nbytes(row.numel)] = bucket.wire[row.wire_offset :][
            : fmt.wire_nbytes(row.numel)
        ]
    assert torch.equal(bucket.wire, untouched)  # nothing but the messages was written


@pytest.mark.parametrize("limit", [1, 200, 10**9])
@pytest.mark.parametrize("stochastic", [False, True])
def test_bytes_do_not_depend_on_how_many_are_stacked(limit: int, stochastic: bool) -> None:
    fmt = Rank1Format(codes=uniform(4, 32), columns=23)
    one, other = Bucket(fmt, ROWS, torch.int8), Bucket(fmt, ROWS, torch.int8)
    for step in range(3):
        x = values(one.numel, step)
        one.loco(x, 0.5, stochastic=stochastic, stochastic_residual=stochastic)
        rank1.loco_encode_(
            x, other.residual, other.scale, other.wire, other.segments, fmt, beta=0.5, reset=False,
            stochastic=stochastic, stochastic_residual=stochastic, seed=0, flag=other.flag, max_elements=limit,
        )  # fmt: skip
        assert torch.equal(one.wire, other.wire)
        assert torch.equal(one.residual, other.residual)


@pytest.mark.parametrize("beta", [0.0, 0.8])
@pytest.mark.parametrize("name", CODES)
def test_what_came_in_has_been_sent_or_is_in_the_residual(name: str, beta: float) -> None:
    bucket = Bucket(Rank1Format(codes=CODES[name], columns=23), ROWS)
    came, sent = [torch.zeros(n, 23, dtype=torch.float64) for n in ROWS], [torch.zeros(n, 23).double() for n in ROWS]
    for step in range(12):
        x = torch.randn(bucket.numel, generator=torch.Generator().manual_seed(step))
        for total, piece in zip(came, bucket.pieces(x), strict=True):
            total += piece
        for total, piece in zip(sent, bucket.loco(x, beta), strict=True):
            total += piece
    for a, b, e in zip(came, sent, bucket.residuals(), strict=True):
        assert torch.allclose(a, b + e.double() / (1.0 - beta), atol=1e-3)
        assert e.numel() == 0 or float(e.abs().max()) > 0


@pytest.mark.parametrize("residual", [torch.float32, torch.int8])
def test_an_idle_row_sends_nothing_and_waits(residual: torch.dtype) -> None:
    fmt = Rank1Format(codes=unit_gain(4, 32), columns=23)
    bucket = Bucket(fmt, (6,), residual)
    bucket.loco(values(bucket.numel))
    before = bucket.residuals()[0].clone()
    assert bool(before[2].any())
    x = values(bucket.numel, 1)
    bucket.pieces(x)[0][2] = 0.0
    sent = bucket.loco(x)[0]
    assert not sent[2].any()
    assert torch.equal(bucket.residuals()[0][2], before[2])


def test_what_waits_in_an_idle_row_does_not_count_in_the_scales_of_columns() -> None:
    fmt, others = Rank1Format(codes=unit_gain(4, 32), columns=23), [0, 1, 3, 4, 5]
    with_idle, without = Bucket(fmt, (6,)), Bucket(fmt, (5,))
    with_idle.residual.view(-1, 23)[1 + 2] = 100.0 * torch.arange(23)
    x = values(with_idle.numel)
    with_idle.pieces(x)[0][2] = 0.0
    sent = with_idle.loco(x)[0]
    assert torch.equal(sent[others], without.loco(torch.cat([x[:3], with_idle.pieces(x)[0][others].view(-1)]))[0])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", CODES)
def test_a_row_that_is_not_finite_is_sent_as_nan_and_spoils_no_other(name: str, bad: float) -> None:
    bucket = Bucket(Rank1Format(codes=CODES[name], columns=23), (6, 4))
    bucket.loco(values(bucket.numel))
    before = bucket.residuals()[0].clone()
    x = values(bucket.numel, 1)
    bucket.pieces(x)[0][4, 7] = bad
    assert not bool(bucket.flag)
    sent = bucket.loco(x)
    assert bool(bucket.flag)
    assert bool(sent[0][4].isnan().all())
    assert bool(sent[0][[0, 1, 2, 3, 5]].isfinite().all())
    assert bool(sent[1].isfinite().all())
    assert torch.equal(bucket.residuals()[0][4], before[4])


@pytest.mark.parametrize("residual", [torch.float32, torch.int8])
@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-37, 1e37, 3e38, 3.4028e38])
def test_at_the_ends_of_float32_a_row_is_sent_or_called_not_finite(
    name: str, size: float, residual: torch.dtype
) -> None:
    bucket = Bucket(Rank1Format(codes=CODES[name], columns=23), (6, 4), residual)
    for step in range(3):
        x = values(bucket.numel, step).sign() * torch.rand(bucket.numel).clamp(min=0.01) * size
        x[3] = size
        bucket.flag.zero_()
        sent = torch.cat(bucket.loco(x, 0.5))
        assert not bool(sent.isinf().any())
        assert bool(sent.isnan().any()) == bool(bucket.flag)
        assert all(bool(e.isfinite().all()) for e in bucket.residuals())


def test_columns_of_zeros_stay_zero_and_a_matrix_of_zeros_too() -> None:
    fmt = Rank1Format(codes=unit_gain(2, 32), columns=23)
    x = values(6 * 23).view(6, 23)
    x[:, [0, 5, 22]] = 0.0
    assert not decoded(fmt, x)[:, [0, 5, 22]].any()
    assert not decoded(fmt, torch.zeros(6, 23)).any()


@pytest.mark.parametrize("name", ["uniform, 4 bits", "uniform, 8 bits", "trits"])
def test_where_there_is_a_zero_no_error_is_larger_than_its_element(name: str) -> None:
    fmt = Rank1Format(codes=CODES[name], columns=64)
    for x in (values(64 * 64).view(64, 64), _cross(64)):
        assert bool(((decoded(fmt, x) - x).abs() <= x.abs()).all())
    assert BlockCodec(fmt).contracts


def _cross(size: int) -> Tensor:
    """A large row and a large column that meet in a small element."""
    x = torch.full((size, size), 1e-3)
    x[0] = x[:, 0] = 1.0
    x[0, 0] = 1e-3
    return x


def test_where_a_large_row_meets_a_large_column_signs_are_no_contraction_and_the_average_bears_it() -> None:
    size = 256
    codec = BlockCodec(Rank1Format(codes=unit_gain(2, 32), columns=size)).nearest()
    x = _cross(size)
    assert float((decoded(codec.fmt, x) - x).square().sum()) > float(x.square().sum())
    assert not codec.contracts
    for codes in (unit_gain(2, 32), unit_gain(4, 64)):
        bucket = Bucket(Rank1Format(codes=codes, columns=size), (size,), torch.int8)
        buffer = torch.cat([torch.zeros(3), x.view(-1)])
        norms = []
        for _ in range(200):
            bucket.loco(buffer, 0.8)
            norms.append(float(bucket.residuals()[0].norm()))
        assert max(norms[100:]) <= 1.1 * max(norms[:100])
