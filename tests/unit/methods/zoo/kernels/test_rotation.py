"""Rotation of rows: its own inverse, and few operations, since the host starts each of them on a GPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods.zoo.chunktopk import cosines
from lowbit_strategy.methods.zoo.eden import EdenCodec
from lowbit_strategy.methods.zoo.kernels.rotation import rotate, signs
from lowbit_strategy.methods.zoo.rotated import RotatedCodec
from testing.worlds.echo import Operations


def operations_of(call: Callable[[], object]) -> Counter[str]:
    with Operations() as operations:
        call()
    return Counter(operations.names)


def rows(size: int) -> Tensor:
    return torch.randn(5, size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [2, 32, 128, 1024])
def test_a_rotation_keeps_lengths_and_can_be_undone(size: int) -> None:
    x = rows(size)
    y = rotate(x)
    torch.testing.assert_close(rotate(y, inverse=True), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    matrix = rotate(torch.eye(size)) * math.sqrt(size)
    torch.testing.assert_close(matrix.abs(), torch.ones(size, size))
    assert set(signs(size, torch.device("cpu")).tolist()) == {1.0, -1.0}


@pytest.mark.parametrize("size", [32, 128])
def test_signs_are_not_made_anew(size: int) -> None:
    """Per stage a sum, a difference and what puts them together; the signs are one product."""
    x = rows(size)
    rotate(x)
    found = operations_of(lambda: rotate(x))
    stages = size.bit_length() - 1
    assert found["aten.mul.Tensor"] == 2  # signs and length
    assert found["aten.add.Tensor"] == found["aten.sub.Tensor"] == found["aten.stack.default"] == stages
    assert not any("shift" in name or "arange" in name or "copy" in name for name in found)


def test_nothing_that_is_kept_is_copied_to_the_device_again() -> None:
    x = rows(64)
    cosines(x, inverse=False)
    assert "aten._to_copy.default" not in operations_of(lambda: cosines(x, inverse=False))


@pytest.mark.skipif(not native.available(), reason="counts the calls of the C kernels")
@pytest.mark.parametrize("codec", [RotatedCodec(BlockCodec(uniform(4, 128)), 32), EdenCodec(1)])
def test_the_second_message_makes_no_constants(codec: Codec) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    segments, flag = Segments([Segment(0, 4096, 0, 0)]), torch.zeros(1, dtype=torch.int32)
    wire = torch.zeros(codec.wire_nbytes(4096), dtype=torch.uint8)

    def encode() -> None:
        codec.encode_(x, wire, segments, {}, StepContext(0, 0, 0), flag)

    signs.cache_clear()
    assert "aten.bitwise_xor.Tensor" in operations_of(encode)  # signs are hashes
    assert not {"aten.bitwise_xor.Tensor", "aten.lift_fresh.default"} & set(operations_of(encode))
