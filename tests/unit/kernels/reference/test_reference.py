"""What the reference promises: bounds, exactness, conservation, no bias, and agreement with NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit_strategy.kernels.codebooks import lloyd_max
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, e2m1, ternary, uniform
from lowbit_strategy.kernels.reference.blocks import (
    decode_sum_,
    encode_,
    pack,
    quantize_residual,
    unpack,
)
from lowbit_strategy.kernels.segments import Segment, Segments

FORMATS = [
    *(uniform(bits, 64) for bits in range(2, 9)),
    *(lloyd_max(bits, 64) for bits in (1, 2, 3)),
    ternary(64),
    e2m1(64),
]


def name(fmt: BlockFormat) -> str:
    return f"{fmt.scale_rule}-{fmt.bits}bits"


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encode(x: Tensor, fmt: BlockFormat, *, stochastic: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Wire and flag."""
    wire, flag = torch.zeros(fmt.wire_nbytes(x.numel()), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    encode_(x, wire, whole(x), fmt, stochastic=stochastic, seed=seed, flag=flag)
    return wire, flag


def decode(wire: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    out = torch.empty(numel)
    decode_sum_(wire[None], out, whole(out), fmt, alpha=1.0)
    return out


def whole(x: Tensor) -> Segments:
    return Segments([Segment(0, x.numel(), 0, 0, salt=11)])


def scales(wire: Tensor, numel: int, fmt: BlockFormat) -> Tensor:
    """float32, one per element."""
    start = fmt.num_blocks(numel) * fmt.code_nbytes
    return wire[start:].clone().view(torch.bfloat16).float().repeat_interleave(fmt.block_size)[:numel]


class Loco:
    """A residual and the steps on it."""

    def __init__(self, numel: int, fmt: BlockFormat, *, int8: bool) -> None:
        self.numel, self.fmt = numel, fmt
        padded = fmt.num_blocks(numel) * fmt.block_size
        self.residual = torch.zeros(padded, dtype=torch.int8 if int8 else torch.float32)
        self.scale = torch.zeros(padded // fmt.block_size, dtype=torch.bfloat16) if int8 else None
        self.wire = torch.zeros(fmt.wire_nbytes(numel), dtype=torch.uint8)
        self.flag = torch.zeros(1, dtype=torch.int32)

    def step(
        self, g: Tensor, *, beta: float = 0.8, seed: int = 0, max_elements: int = 2**62, **options: bool
    ) -> Tensor:
        """What the others decode."""
        feedback = Feedback(
            self.residual,
            self.scale,
            beta,
            options.get("reset", False),
            options.get("stochastic_residual", False),
        )
        encode_(
            g,
            self.wire,
            whole(g),
            self.fmt,
            stochastic=options.get("stochastic", False),
            seed=seed,
            flag=self.flag,
            feedback=feedback,
            max_elements=max_elements,
        )
        return decode(self.wire, self.numel, self.fmt)

    def dequantized(self) -> Tensor:
        if self.scale is None:
            return self.residual
        return self.residual.float() * self.scale.float().repeat_interleave(self.fmt.block_size)


@pytest.mark.parametrize("fmt", FORMATS, ids=name)
def test_unpack_inverts_pack(fmt: BlockFormat) -> None:
    num_codes = 2**fmt.bits - 1 if fmt.is_uniform else len(fmt.codebook or ())
    codes = torch.randint(
        0, num_codes, (50, fmt.block_size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    packed = pack(codes, fmt)
    assert packed.shape == (50, fmt.code_nbytes)
    assert torch.equal(unpack(packed, fmt), codes)


@pytest.mark.parametrize("bits", range(2, 9))
def test_error_is_at_most_half_a_step(bits: int) -> None:
    fmt, x = uniform(bits, 64), gaussian(1000)
    wire, flag = encode(x, fmt)
    error = (decode(wire, 1000, fmt) - x).abs()
    assert not flag
    assert bool((error <= scales(wire, 1000, fmt) * 0.5 * (1 + 1e-6)).all())


@pytest.mark.parametrize("bits", range(2, 9))
def test_points_of_the_grid_are_exact(bits: int) -> None:
    """The largest element lies just under the end of the grid: the scale is the step, however 1 / qmax was rounded."""
    fmt = uniform(bits, 64)
    codes = torch.randint(-fmt.qmax, fmt.qmax + 1, (8, 64), generator=torch.Generator().manual_seed(0))
    step = torch.tensor([2.0**-100, 2.0**-20, 0.5, 1.5, 3.0, 1.25 * 2**60, 1.0, 2.0**-125])
    x = codes.clamp(1 - fmt.qmax, fmt.qmax - 1) * step[:, None]
    x[:, 0] = step * (fmt.qmax * (1 - 2.0**-10))
    decoded = decode(encode(x.view(-1), fmt)[0], 512, fmt).view(8, 64)
    assert torch.equal(decoded[:, 1:], x[:, 1:])
    assert torch.equal(decoded[:, 0], fmt.qmax * step)


@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_what_went_in_came_out_or_is_in_the_residual(beta: float) -> None:
    """sum(Q) = sum(g) - (e_T - e_0) / (1 - beta), with a float32 residual and no reset."""
    loco, total_g, total_q = Loco(500, uniform(4, 64), int8=False), torch.zeros(500), torch.zeros(500)
    for step in range(40):
        g = gaussian(500, step)
        total_q += loco.step(g, beta=beta)
        total_g += g
    left = loco.residual[:500] / (1 - beta)
    assert torch.allclose(total_q, total_g - left, atol=2e-4)
    assert float(left.abs().max()) < 5.0  # while sums of 40 gradients reach 20


@pytest.mark.parametrize("bits", [2, 4])
def test_stochastic_codes_are_unbiased(bits: int) -> None:
    """Means of 4,000 draws lie within 5 standard errors: of 128 elements, all of them in all but 1 of 13,000 seeds."""
    fmt, x, repeats = uniform(bits, 64), gaussian(128), 4000
    step = scales(encode(x, fmt)[0], 128, fmt)
    wire, _ = encode(x.repeat(repeats), fmt, stochastic=True, seed=1)  # every position draws for itself
    mean = decode(wire, 128 * repeats, fmt).view(repeats, 128).double().mean(0)
    fraction = (x / step) - (x / step).floor()
    deviation = (fraction * (1 - fraction)).sqrt() * step / math.sqrt(repeats)
    assert bool(((mean - x).abs() <= 5 * deviation + 1e-5).all())


def test_stochastic_residual_keeps_what_rounding_would_lose() -> None:
    """A block's residual moves by less than half of its int8 scale per step: to nearest it never leaves zero."""
    g = torch.full((64,), 0.001)
    g[0] = 7.0  # a step of 1 in the codes; 0.001 is never sent
    kept = {}
    for stochastic in (False, True):
        loco = Loco(64, uniform(4, 64), int8=True)
        for step in range(200):
            g[0] = 7.4 if step == 0 else 7.0  # leaves a large residual in one element, so the int8 step is coarse
            loco.step(g, seed=step, stochastic_residual=stochastic)
        kept[stochastic] = float(loco.dequantized()[1:].mean())
    assert kept[True] == pytest.approx(200 * 0.2 * 0.001, rel=0.5)


def test_uniform_codes_against_numpy() -> None:
    """4 bits from the definition in NumPy: absmax / 7 rounded up to bfloat16, ties to even, half-split nibbles."""
    x = gaussian(256).numpy()
    expected = bytearray()
    scale_bytes = bytearray()
    for block in x.reshape(4, 64):
        raw = np.float32(np.abs(block).max()) * np.float32(1 / 7)
        bits = (int(raw.view(np.uint32)) + 0xFFFF) & 0xFFFF0000
        scale = np.uint32(bits).view(np.float32)
        codes = np.rint(block * (np.float32(1) / scale)).astype(np.int64) + 7
        expected += bytes(int(low | high << 4) for low, high in zip(codes[:32], codes[32:], strict=True))
        scale_bytes += (bits >> 16).to_bytes(2, "little")
    assert bytes(encode(torch.from_numpy(x), uniform(4, 64))[0].tolist()) == bytes(expected + scale_bytes)


def test_e2m1_against_numpy() -> None:
    """To the nearer float of 4 bits, ties downwards."""
    values = np.array([-12.0, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 12])
    x = torch.tensor([12.0, 10, 10.5, -10, -9.5, 0.5, 0.6, -0.5, -0.4, 2.5, -2.5, 1e-3, 5, 7, -7.1]).repeat(5)[:64]
    decoded = decode(encode(x, e2m1(64))[0], 64, e2m1(64)).numpy()
    nearest = values[np.searchsorted((values[1:] + values[:-1]) / 2, x.numpy(), side="left")]
    assert np.array_equal(decoded, nearest.astype(np.float32))
    assert np.array_equal(np.unique(np.abs(values)), 2 * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]))  # the standard's


def test_ternary_codes_against_numpy() -> None:
    x = gaussian(64).numpy()
    decoded = decode(encode(torch.from_numpy(x), ternary(64))[0], 64, ternary(64)).numpy()
    largest, rounded = np.abs(x).max(), np.abs(decoded).max()
    assert largest <= rounded <= largest * (1 + 2**-7)
    assert np.array_equal(decoded, np.where(np.abs(x) > rounded / 2, np.sign(x) * rounded, np.float32(0.0)))


@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize("fmt", FORMATS, ids=name)
def test_pieces_equal_the_whole_and_padding_stays_zero(fmt: BlockFormat, int8: bool) -> None:
    numel = 1000  # the last block has 40 elements
    together, apart = Loco(numel, fmt, int8=int8), Loco(numel, fmt, int8=int8)
    options = {"stochastic": fmt.is_uniform, "stochastic_residual": True}
    for step in range(3):
        g = gaussian(numel, step)
        out = together.step(g, seed=step, **options)
        assert torch.equal(apart.step(g, seed=step, max_elements=128, **options), out)
        assert torch.equal(apart.wire, together.wire)
        assert torch.equal(apart.residual, together.residual)
        assert not together.residual[numel:].any()


def test_blocks_that_are_idle_or_not_finite_keep_their_residual() -> None:
    loco, fmt = Loco(256, uniform(4, 64), int8=True), uniform(4, 64)
    loco.step(gaussian(256))
    before, scale = loco.residual.clone(), loco.scale.clone() if loco.scale is not None else None
    g = gaussian(256, 1)
    g[:64] = 0.0
    g[70] = math.inf
    g[140] = math.nan
    out = loco.step(g)
    assert loco.scale is not None
    assert scale is not None
    assert bool(loco.flag)
    assert torch.equal(loco.residual[:192], before[:192])
    assert torch.equal(loco.scale[:3], scale[:3])
    assert not torch.equal(loco.residual[192:], before[192:])
    assert not out[:64].any()
    assert bool(out[64:192].isnan().all())
    assert bool(out[192:].isfinite().all())
    nan_scales = loco.wire[fmt.num_blocks(256) * fmt.code_nbytes :][2:6]
    assert nan_scales.tolist() == [0xC0, 0x7F, 0xC0, 0x7F]  # the same NaN on every machine


@pytest.mark.parametrize("int8", [True, False], ids=["int8", "float32"])
@pytest.mark.parametrize("fmt", FORMATS, ids=name)
def test_near_the_largest_float_a_block_is_sent_or_called_not_finite(fmt: BlockFormat, int8: bool) -> None:
    """A scale rounded up must not make values or residuals infinite."""
    largest = torch.finfo(torch.float32).max
    loco = Loco(256, fmt, int8=int8)
    for factor in (0.2, 0.9, 0.999, 1.0, 0.05):
        g = gaussian(256).sign() * largest * factor
        loco.flag.zero_()
        out = loco.step(g, beta=0.0)
        assert bool(out.isnan().any()) == bool(loco.flag)
        assert not bool(out.isinf().any())
        assert bool(loco.dequantized().isfinite().all())


def test_a_residual_near_the_largest_float_saturates() -> None:
    values = torch.full((1, 64), torch.finfo(torch.float32).max)
    codes, scale = quantize_residual(values)
    stored = codes.float() * scale[:, None]
    assert bool(stored.isfinite().all())
    assert torch.allclose(stored, values, rtol=2**-7)


def test_reset_forgets_the_residual_of_every_block() -> None:
    used, fresh = Loco(256, uniform(4, 64), int8=True), Loco(256, uniform(4, 64), int8=True)
    used.step(gaussian(256))
    g = gaussian(256, 1)
    g[:64] = 0.0
    assert torch.equal(used.step(g, reset=True), fresh.step(g))
    assert torch.equal(used.residual, fresh.residual)
    assert not used.residual[:64].any()
