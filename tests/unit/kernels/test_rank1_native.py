"""Scales of rows times columns in C: the reference's bytes, whatever the shape and the instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.codebooks import fitted, ternary, unit_gain
from lowbit_strategy.kernels.format import BlockFormat, Rank1Format, uniform
from lowbit_strategy.kernels.reference import rank1 as reference
from lowbit_strategy.kernels.segments import Segment, Segments
from tests.unit.kernels.native_cases import (
    Case,
    assert_same_bytes,
    compare_encode_and_decode,
    compare_loco_encode,
    examples,
    make_case,
)

pytestmark = pytest.mark.skipif(not native.available(), reason="the C extension is not built")

if native.available():
    from lowbit_strategy.kernels.native import blocks as native_blocks
    from lowbit_strategy.kernels.native import loco as native_loco

CODES = (
    *(uniform(bits, 64) for bits in (2, 3, 4, 8)),
    *(unit_gain(size, block_size) for size, block_size in ((2, 32), (2, 128), (3, 64), (4, 64), (8, 256))),
    fitted(4, 32),
    ternary(32),
    ternary(4096),
    BlockFormat(bits=1, block_size=64, scale_rule="mean_abs", codebook=(-1.0, 1.0)),
    BlockFormat(bits=5, block_size=64, scale_rule="rms", codebook=tuple((i - 10) / 8 for i in range(20))),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    columns = draw(st.sampled_from((1, 3, 16, 17, 63, 64, 65, 130, 300, 1000, 5000)))
    rows = draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 13, 22)), min_size=1, max_size=3))
    fmt = Rank1Format(codes=draw(st.sampled_from(CODES)), columns=columns)
    return make_case(draw, fmt, [count * columns for count in rows])


@examples
@given(case=cases())
def test_loco_encode_writes_the_references_bytes(isa: str, case: Case) -> None:
    compare_loco_encode(reference, native_loco, case)


@examples
@given(case=cases(), num_sources=st.sampled_from((1, 2, 3, 20)), alpha=st.sampled_from((1.0, 0.25, 1 / 3)))
def test_encode_and_decode_sum_write_the_references_bytes(isa: str, case: Case, num_sources: int, alpha: float) -> None:
    compare_encode_and_decode(reference, native_blocks, case, num_sources, alpha)


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    fmt, before = Rank1Format(codes=unit_gain(4, 128), columns=300), torch.get_num_threads()
    case = Case(
        fmt=fmt, numels=[120_000, 90_000, 150_000, 3_000, 90_000], gap=1, dtype=torch.float32, special=[], seed=1,
        residual=torch.int8,
        options={"beta": 0.8, "reset": False, "stochastic": False, "stochastic_residual": True},
    )  # fmt: skip
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(at := case.tensors())
            native_loco.loco_encode_(
                at["x"], at["residual"], at["residual_scale"], at["wire"], case.segments(), fmt, seed=3,
                flag=at["flag"], **case.options,
            )  # fmt: skip
            native_blocks.decode_sum_(at["wire"][None], at["x"], case.segments(), fmt, alpha=0.5)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bytes(other, results[0])


def test_a_buffer_that_ends_before_a_message_is_refused() -> None:
    fmt = Rank1Format(codes=uniform(4, 128), columns=30)
    segments, flag = Segments([Segment(0, 300, 0, 0)]), torch.zeros(1, dtype=torch.int32)
    wire = torch.zeros(fmt.wire_nbytes(300), dtype=torch.uint8)
    with pytest.raises(ValueError, match="segments reach element 300"):
        native_blocks.encode_(torch.zeros(299), wire, segments, fmt, stochastic=False, seed=0, flag=flag)
    with pytest.raises(ValueError, match="segments reach element 300"):
        native_blocks.decode_sum_(wire[None, 1:], torch.zeros(300), segments, fmt, alpha=1.0)
    with pytest.raises(ValueError, match="multiple of the block size 30"):
        native_loco.loco_encode_(
            torch.zeros(300), torch.zeros(600), None, wire, Segments([Segment(0, 300, 64, 0)]), fmt, beta=0.0,
            reset=False, stochastic=False, stochastic_residual=False, seed=0, flag=flag,
        )  # fmt: skip
