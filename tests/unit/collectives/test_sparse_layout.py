"""Sparse messages: what goes in comes out, for any codec, size and destination."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, DenseCodec
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.collectives.layout import dim0_row_numel
from lowbit_strategy.collectives.sparse_layout import Chosen, SparseLayout, counts_nbytes, entries_nbytes
from lowbit_strategy.kernels.format import uniform

_CPU = torch.device("cpu")
_SHAPES = {"long": (300, 700), "small": (3, 5), "empty": (0,), "scalar": (), "rows": (2, 9)}
_CODECS = [DenseCodec("float32"), DenseCodec("bfloat16"), BlockCodec(uniform(4, 64))]


def _layout(world_size: int, *, sharded: bool) -> SparseLayout:
    shapes = _SHAPES.values()
    spans = [dim0_row_numel(shape, world_size) if sharded else torch.Size(shape).numel() for shape in shapes]
    return SparseLayout(list(_SHAPES), spans, world_size if sharded else 1, _CPU)


def _gradients() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(torch.Size(shape).numel(), generator=generator) for name, shape in _SHAPES.items()}


def _choose(x: Tensor, share: float) -> Chosen:
    keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(x.numel())) < share
    indices = keep.nonzero().view(-1)
    return Chosen(indices, x[indices])


def _dense(x: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    return torch.zeros_like(x).index_copy_(0, indices, values)


@pytest.mark.parametrize("codec", _CODECS, ids=lambda codec: codec.label)
@pytest.mark.parametrize("share", [0.0, 0.003, 0.4, 1.0])
def test_all_reduce_messages_hold_what_was_chosen(codec: Codec, share: float) -> None:
    layout, x = _layout(3, sharded=False), _gradients()
    chosen = [_choose(values, share) for values in x.values()]
    message = layout.pack(chosen, codec, seed=1)
    assert len(message.wires) == 1
    (sizes_V,) = layout.sizes(message.counts_DK)
    assert layout.nbytes(sizes_V, codec) == message.wires[0].numel()
    entries = layout.unpack(message.counts_DK[0], sizes_V, message.wires[0], codec)
    total = torch.cat([_dense(v, *part) for v, part in zip(x.values(), entries, strict=True)])
    wanted = [_dense(v, *sent) for v, sent in zip(x.values(), message.sent, strict=True)]
    assert torch.equal(total, torch.cat(wanted))
    if codec == DenseCodec("float32"):
        assert all(torch.equal(c.values, sent.values) for c, sent in zip(chosen, message.sent, strict=True))


@pytest.mark.parametrize("codec", _CODECS, ids=lambda codec: codec.label)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_messages_go_to_the_owners(codec: Codec, world_size: int) -> None:
    layout, x = _layout(world_size, sharded=True), _gradients()
    chosen = [_choose(values, 0.1) for values in x.values()]
    message = layout.pack(chosen, codec, seed=1)
    sizes_DV = layout.sizes(message.counts_DK)
    assert [layout.nbytes(sizes_V, codec) for sizes_V in sizes_DV] == [wire.numel() for wire in message.wires]
    rows = []
    for source in zip(message.counts_DK, sizes_DV, message.wires, strict=True):
        parts = zip(layout.unpack(*source, codec), layout.spans, strict=True)
        rows.append(torch.cat([_dense(torch.zeros(span), *part) for part, span in parts]))
    starts = accumulate(layout.spans, initial=0)
    for i, (start, span, values) in enumerate(zip(starts, layout.spans, x.values(), strict=False)):
        whole = torch.cat([row[start : start + span] for row in rows])[: values.numel()]
        assert torch.equal(whole, _dense(values, *message.sent[i]))


def test_bytes_are_those_of_counts_positions_and_values() -> None:
    layout, x = _layout(2, sharded=False), _gradients()
    chosen = [_choose(values, 0.1) for values in x.values()]
    codec = BlockCodec(uniform(4, 64))
    message = layout.pack(chosen, codec, seed=1)
    assert message.wires[0].numel() == sum(entries_nbytes(c.indices.numel(), codec) for c in chosen)
    assert message.counts_DK.nbytes == sum(counts_nbytes(values.numel()) for values in x.values())
    assert [counts_nbytes(n) for n in (0, 1, 65_536, 65_537)] == [0, 4, 4, 8]


def test_values_do_not_depend_on_the_bucket() -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(3))
    codec, chosen = BlockCodec(uniform(4, 64), "stochastic"), _choose(x, 0.5)
    alone = SparseLayout(["a"], [500], 1, _CPU)
    beside = SparseLayout(["b", "a"], [500, 500], 1, _CPU)
    sent = beside.pack([_choose(x, 0.2), chosen], codec, seed=9).sent[1].values
    assert torch.equal(sent, alone.pack([chosen], codec, seed=9).sent[0].values)


def _damage(what: str, counts_DK: Tensor, wire: Tensor) -> Tensor:
    """One message with one thing wrong."""
    if what == "negative":
        counts_DK[0, 0] -= 1_000_000
    elif what == "more than a block":
        counts_DK[0, -1] = 70_000
    elif what == "moved":
        counts_DK[0, 0] -= 1
        counts_DK[0, -1] += 1  # the sum is right, but the last parameter has two rows of nine
        wire[2 * int(counts_DK.sum()) - 2 :][:2] = 200
    elif what == "huge":
        counts_DK[0, 0] += 60_000
    elif what == "short":
        return wire[:-3]
    return wire


@pytest.mark.parametrize("what", ["negative", "more than a block", "moved", "huge", "short"])
def test_a_damaged_message_is_an_error(what: str) -> None:
    layout = _layout(2, sharded=False)
    message = layout.pack([_choose(values, 0.2) for values in _gradients().values()], DenseCodec(), seed=1)
    wire = _damage(what, message.counts_DK, message.wires[0])
    with pytest.raises(RuntimeError, match="damaged"):
        layout.unpack(message.counts_DK[0], layout.sizes(message.counts_DK)[0], wire, DenseCodec())


@pytest.mark.parametrize("num_blocks", [3, 90])
@pytest.mark.parametrize("counts", [(-5, 25, 10), (10, 9, 31), (31, 0, 30)])
def test_a_table_that_no_rank_could_have_sent_is_an_error(counts: tuple[int, int, int], num_blocks: int) -> None:
    """Its sum may be right: then the message has the size that is announced, and only the table itself is wrong."""
    layout = SparseLayout([f"p{i}" for i in range(num_blocks)], [30] * num_blocks, 1, _CPU)
    table = torch.zeros(2, num_blocks, dtype=torch.int32)
    table[1, -3:] = torch.tensor(counts, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="table 1 of counts is impossible for 1 of"):
        layout.sizes(table)
