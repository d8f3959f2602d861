"""The cosine transform in the place of the rotation: orthonormal, its own definition, better for smooth gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit_strategy.methods.zoo.chunk_codec import ChunkCodec
from lowbit_strategy.methods.zoo.chunktopk import CosineCodec, cosines


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_by_its_definition_and_back() -> None:
    x = noise(5, 16)
    y = cosines(x, inverse=False)
    for k in (0, 1, 7, 15):
        scale = (1 / 16 if k == 0 else 2 / 16) ** 0.5
        wanted = sum(x[:, n] * math.cos(math.pi / 16 * (n + 0.5) * k) for n in range(16)) * scale
        torch.testing.assert_close(y[:, k], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cosines(y, inverse=True), x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))


def test_the_same_bits_whatever_else_is_transformed() -> None:
    x = noise(33, 64)
    assert torch.equal(cosines(x, inverse=False)[7:8], cosines(x[7:8], inverse=False))


def test_smooth_rows_need_few_coefficients() -> None:
    places = torch.linspace(0.0, 3.0, 64)
    x = torch.cat([torch.sin(places * (1 + k / 16)) for k in range(128)])

    def error(codec: ChunkCodec | CosineCodec) -> float:
        return float((codec.decode_sum(codec.encode(x, seed=0)[None], x.numel()) - x).norm() / x.norm())

    plain = ChunkCodec(1 / 16)
    assert error(CosineCodec(plain, 64)) < 0.3 < 0.8 < error(plain)


@pytest.mark.parametrize("numel", [64, 640, 1280, 4096, 4160, 5120])
def test_a_partial_chunk_keeps_coefficients_in_proportion(numel: int) -> None:
    plain = ChunkCodec(density=1 / 64)
    assert CosineCodec(plain, 64).wire_nbytes(numel) == plain.wire_nbytes(numel)
