"""The largest of every 4,096: sizes fixed beforehand, the host waits for nothing, feedback keeps the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowbit_strategy.codecs.base import Codec, DenseCodec, StepContext
from lowbit_strategy.codecs.block import BlockCodec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.reference.select import top_k
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods.zoo.chunk_codec import ChunkCodec
from lowbit_strategy.methods.zoo.feedback import FeedbackCodec

SIZES = (0, 1, 99, 4096, 4097, 12_289)
VALUES: dict[str, Codec] = {
    "float32": DenseCodec("float32"),
    "bfloat16": DenseCodec("bfloat16"),
    "int8": BlockCodec(uniform(8, 128)),
    "int2": BlockCodec(uniform(2, 64)),
}


def _x(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def _largest(x: Tensor, codec: ChunkCodec) -> Tensor:
    """X with all but the sent elements at 0."""
    kept = torch.zeros_like(x)
    for start in range(0, x.numel(), 4096):
        chunk = x[start : start + 4096]
        k = codec.kept if chunk.numel() == 4096 else codec.kept_of_tail(chunk.numel())
        places = start + top_k(chunk, k)
        kept[places] = x[places]
    return kept


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("density", [0.0001, 0.001, 0.05, 1.0])
def test_a_segment_decodes_to_its_chunks_largest(numel: int, density: float) -> None:
    codec, x = ChunkCodec(density), _x(numel)
    wire = codec.encode(x, seed=1)
    assert wire.numel() == codec.wire_nbytes(numel)
    decoded = codec.decode_sum(wire[None], numel)
    assert torch.equal(decoded, _largest(x, codec))
    assert int(decoded.count_nonzero()) == codec.num_kept(numel) <= max(4 * density * numel, numel // 4096 + 1)


def test_a_position_takes_twelve_bits() -> None:
    codec = ChunkCodec(0.01)
    assert codec.kept == 41
    assert codec.wire_nbytes(100 * 4096) == 4100 * 3 // 2 + 10 + 4 * 4100  # 10 bytes up to a multiple of 16


@pytest.mark.parametrize("name", VALUES)
def test_segments_do_not_touch_each_other(name: str) -> None:
    """A bucket of several pieces with gaps between them, from three ranks."""
    codec = ChunkCodec(0.02, VALUES[name])
    rows, x_at, wire_at = [], 3, 0
    for salt, numel in enumerate(SIZES):
        rows.append(Segment(x_at, numel, 0, wire_at, salt))
        x_at += numel + 5
        wire_at += -(-codec.wire_nbytes(numel) // 16) * 16
    segments = Segments(rows)
    sources = [_x(x_at, seed) for seed in range(3)]
    wires = torch.zeros(3, wire_at, dtype=torch.uint8)
    flag = torch.zeros(1, dtype=torch.int32)
    for wire, x in zip(wires, sources, strict=True):
        codec.encode_(x, wire, segments, {}, StepContext(0, 7, 0), flag)
    assert not flag.item()
    out = torch.full((x_at,), 9.0)
    codec.decode_sum_(wires, out, segments, {}, 0.5)
    wanted = torch.full((x_at,), 9.0)
    for row in rows:
        pieces = [_largest(x[row.x_offset : row.x_offset + row.numel], codec) for x in sources]
        wanted[row.x_offset : row.x_offset + row.numel] = 0.5 * (pieces[0] + pieces[1] + pieces[2])
    if name == "float32":
        assert torch.equal(out, wanted)
    else:
        torch.testing.assert_close(out, wanted, atol={"bfloat16": 0.05, "int8": 0.1, "int2": 4.0}[name], rtol=0)
        assert torch.equal(out[:3], wanted[:3])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", VALUES)
def test_what_is_not_finite_arrives(name: str, bad: float) -> None:
    codec, x = ChunkCodec(0.001, VALUES[name]), _x(9000)
    x[5000] = bad
    flag, wire = torch.zeros(1, dtype=torch.int32), torch.zeros(codec.wire_nbytes(9000), dtype=torch.uint8)
    codec.encode_(x, wire, Segments([Segment(0, 9000, 0, 0)]), {}, StepContext(0, 1, 0), flag)
    assert flag.item() == 1
    assert not codec.decode_sum(wire[None], 9000)[5000].isfinite()


def test_damaged_bytes_decode_to_something_inside_the_segment() -> None:
    codec = ChunkCodec(0.01)
    wire = torch.randint(0, 256, (3, codec.wire_nbytes(10_000)), generator=torch.Generator().manual_seed(0))
    assert codec.decode_sum(wire.to(torch.uint8), 10_000).shape == (10_000,)


class _NoHost(TorchDispatchMode):
    """Fails on whatever makes the host wait for a GPU: values that are read, shapes that depend on them."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = func.name().removeprefix("aten::").split(".")[0]
        if name in self.FORBIDDEN:
            raise AssertionError(f"the host waits in {func.name()}")
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]), func.name()
        if name == "repeat_interleave":
            raise AssertionError(f"a shape depends on values in {func.name()}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("name", VALUES)
def test_the_host_waits_for_nothing_in_a_step(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels == "torch" and name.startswith("int"):
        pytest.skip("the plain PyTorch kernels of block codes look at their flag")
    monkeypatch.setenv("LOWBIT_KERNELS", kernels)
    stateful = FeedbackCodec(codec=ChunkCodec(0.01, VALUES[name]))
    segments = Segments([Segment(0, 9000, 0, 0, 1)])
    state = {"residual": torch.zeros(3 * 4096)}
    wires = torch.zeros(2, stateful.wire_nbytes(9000), dtype=torch.uint8)
    flag, out = torch.zeros(1, dtype=torch.int32), torch.empty(9000)
    for step in range(3):
        x = _x(9000, step)
        if step == 0:  # tables are made once
            stateful.encode_(x, wires[0], segments, state, StepContext(0, 1, 1), flag)
            stateful.decode_sum_(wires, out, segments, state, 0.5)
            continue
        with _NoHost():
            stateful.encode_(x, wires[0], segments, state, StepContext(step, step, step), flag)
            stateful.decode_sum_(wires, out, segments, state, 0.5)
    assert out.count_nonzero()


def test_the_check_for_waiting_finds_what_waits() -> None:
    x = _x(10)
    for wait in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[x > 0], lambda: bool(x.any())):
        with pytest.raises(AssertionError), _NoHost():
            wait()
