"""EDEN's code: all of any block arrives, contraction in its nearest form, sums rotated back once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.codebooks import unbiased_lloyd_max
from lowbit_strategy.methods.zoo.contraction import contracts, hard_blocks
from lowbit_strategy.methods.zoo.eden import EdenCodec
from lowbit_strategy.methods.zoo.kernels.rotation import hadamard, signs

SIZE = 128


def heavy(num_blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(num_blocks * SIZE, generator=generator) * torch.randn(num_blocks * SIZE, generator=generator).exp()
    )


def decoded(codec: EdenCodec | BlockCodec, x: Tensor) -> Tensor:
    return codec.decode_sum(codec.encode(x, seed=0)[None], x.numel())


def share_and_error(codec: EdenCodec | BlockCodec, x: Tensor) -> tuple[float, float]:
    sent = decoded(codec, x).double()
    return float(sent @ x.double() / x.double().square().sum()), float(
        (sent - x).square().sum() / x.double().square().sum()
    )


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_every_block_keeps_its_own_direction(bits: int) -> None:
    for block in [*hard_blocks(SIZE), *heavy(20).view(-1, SIZE)]:
        share, _ = share_and_error(EdenCodec(bits, SIZE), block)
        assert share == pytest.approx(1.0, abs=2**-8)  # the scale has 8 bits


def test_heavy_tails_where_a_codebook_of_unit_gain_fails() -> None:
    x = heavy(200)
    share, error = share_and_error(EdenCodec(1, 32), x)
    other_share, other_error = share_and_error(BlockCodec(unbiased_lloyd_max(2, 32)), x)
    assert other_share < 0.7 < 0.99 < share
    assert error < 0.5 < 1.0 < other_error


def test_one_bit_is_drive() -> None:
    """``S = |x|^2 / |R x|_1`` with the matrix written out."""
    x = heavy(1)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < SIZE:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    rotation = matrix / SIZE**0.5 * signs(SIZE, x.device)
    y = rotation @ x
    expected = rotation.T @ (y.sign() * (x.square().sum() / y.abs().sum()))
    torch.testing.assert_close(decoded(EdenCodec(1, SIZE), x), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("bits", [1, 4])
def test_the_nearest_form_shrinks_every_block(bits: int) -> None:
    codec = EdenCodec(bits, SIZE)
    assert contracts(codec.nearest())
    worst = hadamard(torch.eye(SIZE)[:1]).view(-1) * signs(SIZE, torch.device("cpu"))  # rotated: a single element
    assert share_and_error(codec, worst)[1] > 1.0 or bits > 1
    assert share_and_error(codec.nearest(), worst)[1] < 1.0


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_squares_of_small_and_large_blocks(size: float) -> None:
    share, error = share_and_error(EdenCodec(2, SIZE), heavy(3) * size)
    assert share == pytest.approx(1.0, abs=2**-8)
    assert error < 0.3


def test_zeros_and_what_is_not_finite() -> None:
    codec, x = EdenCodec(2, SIZE), heavy(3)
    x[:SIZE] = 0.0
    x[SIZE + 5] = torch.inf
    sent = decoded(codec, x)
    assert bool((sent[:SIZE] == 0).all())
    assert bool(sent[SIZE : 2 * SIZE].isnan().all())
    assert bool(sent[2 * SIZE :].isfinite().all())


def test_bytes_and_sums() -> None:
    codec = EdenCodec(2, SIZE)
    assert codec.wire_nbytes(3 * SIZE - 1) == 3 * (SIZE // 4 + 2)
    xs = [heavy(2)[: 2 * SIZE - 7] * factor for factor in (1.0, -0.3, 2.0)]
    wires = torch.stack([codec.encode(x, seed=0) for x in xs])
    expected = sum(decoded(codec, x) for x in xs)
    torch.testing.assert_close(codec.decode_sum(wires, 2 * SIZE - 7), expected, rtol=1e-4, atol=1e-5)
