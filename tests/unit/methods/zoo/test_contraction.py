"""Codes that feedback can do with shrink what they have not sent; the others declare it. Zeros stay zeros."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.codebooks import lloyd_max
from lowbit_strategy.kernels.format import BlockFormat, ternary, uniform
from lowbit_strategy.methods.zoo.contraction import contracts, hard_blocks, nearest, shrinks
from lowbit_strategy.methods.zoo.eden import EdenCodec
from lowbit_strategy.methods.zoo.natural import NaturalCodec
from lowbit_strategy.methods.zoo.onebitsgd import TwoMeansCodec
from lowbit_strategy.methods.zoo.rotated import RotatedCodec

SHRINK: dict[str, Codec] = {
    "dense": DenseCodec(),
    "bfloat16": DenseCodec("bfloat16"),
    "2 bits": BlockCodec(uniform(2, 128)),
    "ternary": BlockCodec(ternary(128)),
    "signs": BlockCodec(BlockFormat(bits=1, block_size=4096, scale_rule="mean_abs", codebook=(-1.0, 1.0))),
    "fitted, 2 bits": BlockCodec(lloyd_max(2, 64)),
    "two means": TwoMeansCodec(4096),
    "rotated": RotatedCodec(BlockCodec(uniform(2, 64))),
    "natural, 2 bits, nearest": NaturalCodec(2, 128).nearest(),
    "natural, 8 bits, nearest": NaturalCodec(8, 128).nearest(),
    "fitted, 1 bit, nearest": nearest(BlockCodec(lloyd_max(1, 64))),
}
GROW: dict[str, Codec] = {
    "stochastic 2 bits": BlockCodec(uniform(2, 128), "stochastic"),
    "fitted, 1 bit": BlockCodec(lloyd_max(1, 64)),
    "fitted, 2 bits, large blocks": BlockCodec(lloyd_max(2, 512)),
    "rotated": RotatedCodec(BlockCodec(lloyd_max(1, 64))),
}


KEEP_ZEROS = {"dense", "bfloat16", "2 bits", "ternary", "natural, 2 bits, nearest"}
KEEP_ZEROS |= {"natural, 8 bits, nearest", "stochastic 2 bits"}


def decoded(codec: Codec, x: Tensor) -> Tensor:
    return codec.decode_sum(codec.encode(x, seed=0)[None], x.numel())


def ratio(codec: Codec, x: Tensor) -> float:
    """Energy of the error relative to that of x."""
    return float((x - decoded(codec, x)).double().square().sum() / x.double().square().sum())


@pytest.mark.parametrize("name", SHRINK)
def test_codes_that_shrink(name: str) -> None:
    codec = SHRINK[name]
    assert contracts(codec)
    generator = torch.Generator().manual_seed(1)
    size = max(codec.block_size, 64)
    for x in [*hard_blocks(size), *(torch.randn(size, generator=generator) ** power for power in (1, 2, 3, 7))]:
        assert ratio(codec, x) < 1


@pytest.mark.parametrize("name", GROW)
def test_codes_that_do_not(name: str) -> None:
    assert not contracts(GROW[name])


def test_one_bit_codebooks_overshoot_on_blocks_with_one_element() -> None:
    """The figure in LoCo's documentation."""
    x = torch.zeros(64)
    x[5] = 1.0
    assert ratio(BlockCodec(lloyd_max(1, 64)), x) == pytest.approx(1.44, abs=0.01)
    assert ratio(nearest(BlockCodec(lloyd_max(1, 64))), x) < 1


def test_natural_rounds_to_the_nearer_power() -> None:
    codec = NaturalCodec(4, 64).nearest()  # powers from 2**-6 to 1, and 0
    x = torch.zeros(64)
    x[:8] = torch.tensor([1.0, 0.76, 0.74, -0.38, -0.37, 2.0**-6, 0.51 * 2.0**-6, 0.49 * 2.0**-6])
    expected = torch.zeros(64)
    expected[:8] = torch.tensor([1.0, 1.0, 0.5, -0.5, -0.25, 2.0**-6, 2.0**-6, 0.0])
    assert torch.equal(decoded(codec, x), expected)


def test_a_map_that_doubles_is_no_contraction() -> None:
    assert shrinks(lambda x: 0.5 * x, 32)
    assert not shrinks(lambda x: 2.0 * x, 32)
    assert not shrinks(torch.zeros_like, 32)


@pytest.mark.parametrize(("name", "codec"), [*SHRINK.items(), *GROW.items(), ("eden", EdenCodec(2))])
def test_zeros(name: str, codec: Codec) -> None:
    """Of a whole block always; beside other values where there is a code for them."""
    assert codec.keeps_zeros == (name in KEEP_ZEROS)
    size = max(codec.block_size, 64)
    x = torch.randn(3, size, generator=torch.Generator().manual_seed(2))
    x[1] = 0.0
    x[2, 5:40] = 0.0
    before, block, after = decoded(codec, x.view(-1)).view(3, -1)
    assert before.any()
    assert not block.any()
    assert after[5:40].any() == (name not in KEEP_ZEROS)
