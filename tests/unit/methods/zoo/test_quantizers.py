"""Quantizers against NumPy transcriptions of their definitions.

Deterministic ones must agree exactly (up to the stated rounding of a scale). Stochastic ones: every value lies on one
of the two neighboring levels, and the mean of R draws is within `Z` standard errors of the input, element by element,
with the standard error from the definition. With Z = 5.5 and some thousand elements a correct quantizer fails one run
in 10,000; seeds are fixed, so a run that passes goes on passing.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.codebooks import lloyd_max
from lowbit_strategy.kernels.format import ternary, uniform
from lowbit_strategy.kernels.integers import BITS
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods.signsgd import SignCodec
from lowbit_strategy.methods.zoo.contraction import nearest
from lowbit_strategy.methods.zoo.kernels.rotation import hadamard
from lowbit_strategy.methods.zoo.natural import NaturalCodec
from lowbit_strategy.methods.zoo.onebitsgd import TwoMeansCodec
from lowbit_strategy.methods.zoo.rotated import RotatedCodec

Z = 5.5
DRAWS = 400
SCALE_ROUNDING = 2.0**-7  # a scale is rounded up to bfloat16, by less than this share of it

CODECS: dict[str, Codec] = {
    "qsgd max": BlockCodec(uniform(4, 64), "stochastic"),
    "two means": TwoMeansCodec(64),
    "signs": SignCodec(64),
    "natural 8": NaturalCodec(8, 64),
    "natural 3": NaturalCodec(3, 64),
    "natural 3, nearest": NaturalCodec(3, 64).nearest(),
    "signs at the mean magnitude": nearest(BlockCodec(lloyd_max(1, 64))),
    "rotated": RotatedCodec(BlockCodec(uniform(4, 64), "nearest")),
    "rotated by 32": RotatedCodec(NaturalCodec(4, 64), 32),
    "fitted": BlockCodec(lloyd_max(2, 64)),
    "ternary": BlockCodec(ternary(64)),
}


def gaussian(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def decoded(codec: Codec, x: Tensor, seed: int = 0) -> Tensor:
    return codec.decode_sum(codec.encode(x, seed=seed)[None], x.numel())


def draws(codec: Codec, x: Tensor) -> np.ndarray:
    """float64 [DRAWS, N]."""
    return np.stack([decoded(codec, x, seed).double().numpy() for seed in range(DRAWS)])


def blocks_of(x: Tensor, size: int) -> list[np.ndarray]:
    return np.split(x.double().numpy(), range(size, x.numel(), size))


def assert_unbiased(samples_RN: np.ndarray, expected_N: np.ndarray, deviation_N: np.ndarray) -> None:
    """The mean is within Z standard errors; where there is no randomness it is exact to rounding."""
    error_N = np.abs(samples_RN.mean(0) - expected_N)
    bound_N = Z * deviation_N / np.sqrt(len(samples_RN)) + 1e-6 * np.abs(expected_N).max()
    assert (error_N <= bound_N).all(), f"{(error_N - bound_N).max()} beyond the interval"


# -- what every codec must do ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CODECS)
def test_size_is_exact_and_zero_stays_zero(name: str) -> None:
    codec = CODECS[name]
    for numel in (1, 63, 64, 65, 1000):
        wire = codec.encode(gaussian(numel), seed=1)
        assert wire.dtype == torch.uint8
        assert wire.numel() == codec.wire_nbytes(numel)
        assert not decoded(codec, torch.zeros(numel)).any()


@pytest.mark.parametrize("name", CODECS)
def test_sum_of_sources_is_the_sum_of_what_they_decode_to(name: str) -> None:
    codec = CODECS[name]
    sources = [gaussian(200, seed) for seed in range(3)]
    wires = torch.stack([codec.encode(x, seed=9) for x in sources])
    separately = sum(decoded(codec, x, 9) for x in sources)
    assert torch.allclose(codec.decode_sum(wires, 200), separately, atol=1e-5)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_marks_its_block_alone(name: str, value: float) -> None:
    codec = CODECS[name]
    x = gaussian(200)
    x[70] = value
    finite = decoded(codec, x).isfinite()
    assert not finite[64:128].any() or not finite[64:96].any()  # 32 rotated together are half a block
    assert finite[:64].all()
    assert finite[128:].all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_segments_are_coded_as_tensors_of_their_own(name: str, dtype: torch.dtype) -> None:
    """A bucket of several pieces, in any order and with gaps, gives each piece the bytes it would have alone."""
    codec = CODECS[name]
    x = gaussian(400).to(dtype)
    rows = [Segment(10, 130, 0, 0, 5), Segment(200, 70, 192, 304, 6), Segment(300, 1, 320, 608, 7)]
    wire, flag = torch.zeros(800, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    codec.encode_(x, wire, Segments(rows), {}, StepContext(0, 3, 0), flag)
    assert not flag.item()
    out = torch.full((400,), 7.0)
    codec.decode_sum_(wire[None], out, Segments(rows), {}, 2.0)
    for row in rows:
        alone = torch.zeros(800, dtype=torch.uint8)
        codec.encode_(x, alone, Segments([row]), {}, StepContext(0, 3, 0), flag)
        used = slice(row.wire_offset, row.wire_offset + codec.wire_nbytes(row.numel))
        assert torch.equal(wire[used], alone[used])
        sent = torch.zeros(400)
        codec.decode_sum_(alone[None], sent, Segments([row]), {}, 1.0)
        where = slice(row.x_offset, row.x_offset + row.numel)
        assert torch.equal(out[where], sent[where] * 2.0)
    assert (out[:10] == 7.0).all()
    assert (out[301:] == 7.0).all()


@pytest.mark.parametrize("name", CODECS)
def test_nonfinite_raises_the_flag(name: str) -> None:
    x, flag = gaussian(64), torch.zeros(1, dtype=torch.int32)
    x[3] = torch.nan
    codec = CODECS[name]
    wire = torch.zeros(codec.wire_nbytes(64), dtype=torch.uint8)
    codec.encode_(x, wire, Segments([Segment(0, 64, 0, 0)]), {}, StepContext(0, 0, 0), flag)
    assert flag.item() == 1


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_any_magnitude(name: str, factor: float) -> None:
    """Multiplying by a power of two multiplies what is sent: nothing overflows or vanishes on the way."""
    codec, power = CODECS[name], 2.0 ** round(np.log2(factor))
    x = gaussian(128)
    assert torch.allclose(decoded(codec, x * power) / power, decoded(codec, x), rtol=1e-5)


# -- QSGD ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_qsgd_is_its_definition(bits: int) -> None:
    """``Q(v) = norm / s * sign(v) * xi``, ``xi = floor(s|v|/norm) + Bernoulli(frac)``."""
    size, s = 64, 2 ** (bits - 1) - 1
    codec = BlockCodec(uniform(bits, size), "stochastic")
    x = gaussian(500)
    samples_RN = draws(codec, x)
    for k, v in enumerate(blocks_of(x, size)):
        length = np.abs(v).max()
        sent_RN = samples_RN[:, k * size : k * size + v.size]
        # The scale on the wire, norm / s rounded up, from what was sent; every value is a whole number of it.
        steps = np.abs(sent_RN)[sent_RN != 0]
        if not steps.size:
            continue
        step = _common_step(steps, length / s)
        xi_RN = np.round(np.abs(sent_RN) / step)
        assert np.allclose(xi_RN * step, np.abs(sent_RN), rtol=1e-6)
        exact_N = np.abs(v) / step
        assert ((xi_RN == np.floor(exact_N)) | (xi_RN == np.floor(exact_N) + 1)).all()
        assert (np.sign(sent_RN) * np.sign(v) >= 0).all()
        fraction_N = exact_N - np.floor(exact_N)
        assert_unbiased(sent_RN, v, step * np.sqrt(fraction_N * (1 - fraction_N)))


def _common_step(values: np.ndarray, unrounded: float) -> float:
    """The bfloat16 step at or above `unrounded` that all values are multiples of."""
    step = float(torch.tensor(unrounded, dtype=torch.float32).to(torch.bfloat16))
    candidates = [
        step,
        float(torch.nextafter(torch.tensor(step, dtype=torch.bfloat16), torch.tensor(torch.inf).bfloat16())),
    ]
    fits = [
        c
        for c in candidates
        if c >= unrounded * (1 - 1e-6) and np.allclose(np.round(values / c) * c, values, rtol=1e-6)
    ]
    assert fits, "what was sent is not on the grid of norm / s rounded up to bfloat16"
    assert fits[0] <= unrounded * (1 + SCALE_ROUNDING)
    return fits[0]


# -- sign methods ----------------------------------------------------------------------------------------------------


def test_sign_codec_is_its_definition() -> None:
    """``mean|g| * sign(g)`` with sign(0) = 1; the mean in bfloat16."""
    x = gaussian(300)
    x[7] = 0.0
    sent = decoded(SignCodec(64), x).double().numpy()
    for k, g in enumerate(blocks_of(x, 64)):
        mean = np.abs(g).mean()
        expected = np.where(g >= 0, mean, -mean)
        assert np.allclose(sent[k * 64 : k * 64 + g.size], expected, rtol=2.0**-8)


def test_two_means_is_its_definition() -> None:
    x = gaussian(300)
    x[7] = 0.0
    sent = decoded(TwoMeansCodec(64), x).double().numpy()
    for k, g in enumerate(blocks_of(x, 64)):
        expected = np.where(g >= 0, g[g >= 0].mean(), g[g < 0].mean())
        assert np.allclose(sent[k * 64 : k * 64 + g.size], expected, rtol=2.0**-8)


def test_two_means_of_one_sign() -> None:
    x = gaussian(64).abs() + 1.0
    assert torch.allclose(decoded(TwoMeansCodec(64), x), x.mean().expand(64), rtol=2.0**-8)
    assert torch.allclose(decoded(TwoMeansCodec(64), -x), -x.mean().expand(64), rtol=2.0**-8)


def test_bits_pack_and_unpack() -> None:
    bits = torch.rand(5, 64, generator=torch.Generator().manual_seed(0)) < 0.5
    assert BITS.pack(bits.byte()).shape == (5, 8)
    assert torch.equal(BITS.unpack(BITS.pack(bits.byte())).bool(), bits)


# -- natural compression ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [3, 8])
def test_natural_is_its_definition(bits: int) -> None:
    """Neighboring powers of two; below the smallest level, that level or 0."""
    size, num_powers = 64, 2 ** (bits - 1) - 1
    x = gaussian(300)
    samples_RN = draws(NaturalCodec(bits, size), x)
    for k, g in enumerate(blocks_of(x, size)):
        top = np.ceil(np.log2(np.abs(g).max()))
        smallest = 2.0 ** (top - num_powers + 1)
        below_N = np.where(np.abs(g) < smallest, 0.0, 2.0 ** np.floor(np.log2(np.abs(g))))
        above_N = np.where(np.abs(g) < smallest, smallest, 2.0 * below_N)
        sent_RN = samples_RN[:, k * size : k * size + g.size]
        assert ((np.abs(sent_RN) == below_N) | (np.abs(sent_RN) == above_N)).all()
        p_N = (np.abs(g) - below_N) / (above_N - below_N)
        assert_unbiased(sent_RN, g, (above_N - below_N) * np.sqrt(p_N * (1 - p_N)))
        if bits == 8:  # the published bound on the second moment
            second_N = (sent_RN**2).mean(0)
            assert (second_N <= 9 / 8 * g**2 * (1 + Z / np.sqrt(DRAWS))).all()


def test_natural_keeps_powers_of_two() -> None:
    x = torch.tensor([1.0, -0.5, 2.0**-20, 0.0, -4.0])
    assert torch.equal(decoded(NaturalCodec(8, 64), x), x)


# -- rotation --------------------------------------------------------------------------------------------------------


def test_hadamard_is_the_matrix() -> None:
    matrix = np.ones((1, 1))
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = gaussian(48).view(3, 16)
    assert np.allclose(hadamard(x).numpy(), x.numpy() @ matrix.T / 4.0, atol=1e-6)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-6)


def test_rotation_spreads_an_outlier() -> None:
    """One spike in noise: an even grid for the spike erases the noise, after a rotation it does not."""
    x = gaussian(256) * 0.01
    x[10] = 1.0
    plain, rotated = BlockCodec(uniform(3, 128)), RotatedCodec(BlockCodec(uniform(3, 128)))
    others = torch.arange(256) != 10
    assert (decoded(plain, x) - x)[:128].norm() > 0
    assert not decoded(plain, x)[:128][others[:128]].any()
    assert decoded(rotated, x)[:128][others[:128]].any()


def test_rotation_of_a_fine_codec_changes_nothing() -> None:
    x = gaussian(300)
    assert (decoded(RotatedCodec(BlockCodec(uniform(8, 64))), x) - x).norm() < 0.01 * x.norm()


@pytest.mark.parametrize("size", [3, 128, 0, 1])
def test_rotation_refuses_sizes_that_do_not_fit(size: int) -> None:
    with pytest.raises(ValueError, match="power of two that divides the block size 64"):
        RotatedCodec(BlockCodec(uniform(4, 64)), size)
