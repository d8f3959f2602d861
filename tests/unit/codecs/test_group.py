"""The largest of every group: what it decodes to, its size, and what feedback makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.codecs.chunk import GROUPS, GroupTop
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods.topk import TopK
from testing.worlds.one_tensor import OneTensor, gaussian


def _largest(x: Tensor, group: int) -> Tensor:
    kept = torch.zeros_like(x)
    for start in range(0, x.numel(), group):
        at = start + int(x[start : start + group].abs().argmax())
        kept[at] = x[at]
    return kept


@pytest.mark.parametrize("numel", [1, 15, 16, 33, 1000])
@pytest.mark.parametrize("group", GROUPS)
def test_a_segment_decodes_to_its_groups_largest(group: int, numel: int) -> None:
    codec, x = GroupTop(group), gaussian((numel,), seed=numel)
    wire = codec.encode(x, seed=1)
    assert wire.numel() == codec.wire_nbytes(numel)
    assert torch.equal(codec.decode_sum(wire[None], numel), _largest(x, group))


def test_segments_lie_anywhere_and_sources_add_up() -> None:
    codec = GroupTop(16, BlockCodec(uniform(8, 64)))
    a, b = gaussian((300,), 0), gaussian((300,), 1)
    rows, wire_offset = [], 16
    for x_offset, numel in ((5, 100), (110, 33), (150, 150)):
        rows.append(Segment(x_offset, numel, 0, wire_offset))
        wire_offset += -(-codec.wire_nbytes(numel) // 16) * 16
    wires, flag, out = (
        torch.zeros(2, wire_offset, dtype=torch.uint8),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(300),
    )
    for x, wire in zip((a, b), wires, strict=True):
        codec.encode_segments_(x, wire, Segments(rows), seed=0, flag=flag)
    codec.decode_sum_segments_(wires, out, Segments(rows), alpha=0.5)
    assert not flag
    for row in rows:
        part = slice(row.x_offset, row.x_offset + row.numel)
        mean = (_largest(a[part], 16) + _largest(b[part], 16)) / 2
        torch.testing.assert_close(out[part], mean, atol=0.02, rtol=0.0)


def test_half_a_bit() -> None:
    codec = GroupTop(16, BlockCodec(uniform(2, 64)))
    assert 8 * codec.wire_nbytes(2**20) / 2**20 == 0.390625  # 4 bits of position and 2.25 of value for 16 elements


def test_a_constant_gradient_arrives_whole_in_the_end() -> None:
    world = OneTensor(TopK(selection="group", density=1 / 16, exempt=()), (64, 64), 2)
    g = gaussian((64, 64), 3)
    mean = sum(world.step([g, g]) for _ in range(200)) / 200
    assert float((mean - g.view(-1)).norm() / g.norm()) < 0.15


def test_decay_lets_go_of_what_is_never_sent() -> None:
    world = OneTensor(TopK(selection="group", density=1 / 16, decay=0.5, exempt=()), (16, 16), 2)
    g = gaussian((16, 16), 3)
    for _ in range(50):
        sent = world.step([g, g])
    residual = world.state(0)["uplink.residual"]
    assert float(residual.abs().max()) <= float(g.abs().max()) * 1.01  # a sum of halves
    assert sent.count_nonzero() == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "group", "density": 0.01}, "density must be 1/4, 1/16 or 1/256"),
        ({"selection": "group", "density": 1 / 16, "return_density": 0.5}, "return_density needs selection='chunk'"),
        ({"selection": "chunk", "decay": 0.0}, "decay must be in"),
        ({"decay": 0.9}, "decay needs selection='chunk' or 'group'"),
    ],
)
def test_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopK(**options)  # type: ignore[arg-type]


def test_a_group_has_one_of_three_sizes() -> None:
    with pytest.raises(ValueError, match="group must be 4, 16 or 256"):
        GroupTop(8, DenseCodec("float32"))
