"""Floats that are sent as they are: every backend writes the reference's bytes and sums, by one call for a bucket."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.format import DenseFormat
from lowbit_strategy.kernels.native import threads
from lowbit_strategy.kernels.reference import dense as reference
from lowbit_strategy.kernels.segments import Segment, Segments
from testing.kernels.cases import check_dense, dense_case

ISAS = ("avx512", "avx2", "portable")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("isa", ISAS)
def test_c_writes_the_references_bytes(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available() or isa not in native.isas():
        pytest.skip(f"this processor or this build has no {isa}")
    monkeypatch.setenv(native.ISA_OVERRIDE, isa)
    from lowbit_strategy.kernels.native import blocks as dense

    assert check_dense(dense, "cpu") == []


def test_threads_share_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.available():
        pytest.skip("the C extension is not built")
    from lowbit_strategy.kernels.native import blocks as dense

    monkeypatch.setattr(threads, "GRAIN", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert check_dense(dense, "cpu") == []
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("wire", "floats"), [*itertools.product(("float32", "bfloat16"), FLOATS)])
def test_the_reference_is_a_plain_copy_and_a_sum_in_rank_order(wire: str, floats: torch.dtype) -> None:
    segments, rows, wire_nbytes = dense_case(floats, num_rows=3)
    fmt = DenseFormat(wire)  # type: ignore[arg-type]
    rows = [x.nan_to_num(0.0, 0.0, 0.0).clamp(-6e4, 6e4) for x in rows]
    message_WB, flag = torch.full((3, wire_nbytes), 0xA5, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    for x, message in zip(rows, message_WB, strict=True):
        reference.encode_(x, message, segments, fmt, flag=flag)
    assert not flag.any()
    out = torch.full_like(rows[0], 7.0)
    reference.decode_sum_(message_WB, out, segments, fmt, alpha=1 / 3)
    wanted = torch.full_like(rows[0], 7.0)
    for piece in segments.rows:
        where = slice(piece.x_offset, piece.x_offset + piece.numel)
        a, b, c = (x[where].to(fmt.torch_dtype).float() for x in rows)
        wanted[where] = ((a + b + c) * (1 / 3)).to(floats)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_number_that_is_not_finite_raises_the_flag(
    value: float, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "native" and not native.available():
        pytest.skip("the C extension is not built")
    monkeypatch.setenv("LOWBIT_KERNELS", backend)
    segments = Segments([Segment(5, 40, 0, 16), Segment(60, 1, 0, 256)])
    x, wire = torch.ones(100), torch.zeros(512, dtype=torch.uint8)
    x[50] = value  # between the segments: not sent
    for place, expected in ((50, 0), (60, 1), (44, 1)):
        x[5:45] = x[60] = 1.0
        x[place] = value
        flag = torch.zeros(1, dtype=torch.int32)
        encode_(x, wire, segments, DenseFormat(), flag=flag)
        assert int(flag) == expected, place


def test_what_overflows_on_the_wire_raises_the_flag() -> None:
    """Finite in float32, infinite once it is rounded to bfloat16: every rank decodes inf."""
    x, wire, flag = torch.tensor([3.4e38]), torch.zeros(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    encode_(x, wire, Segments([Segment(0, 1, 0, 0)]), DenseFormat("bfloat16"), flag=flag)
    out = torch.zeros(1)
    decode_sum_(wire[None], out, Segments([Segment(0, 1, 0, 0)]), DenseFormat("bfloat16"))
    assert out.isinf().all()
    assert int(flag) == 1


def test_segments_beyond_the_buffers_and_overlapping_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, wire, flag = torch.ones(8), torch.zeros(32, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    if native.available():
        with pytest.raises(ValueError, match="segments reach element 9"):
            encode_(x, wire, Segments([Segment(1, 8, 0, 0)]), DenseFormat(), flag=flag)
    monkeypatch.setenv("LOWBIT_KERNELS", "torch")
    with pytest.raises(ValueError, match="overlap in wire_offset"):
        encode_(x, wire, Segments([Segment(0, 4, 0, 0), Segment(4, 4, 0, 8)]), DenseFormat(), flag=flag)
