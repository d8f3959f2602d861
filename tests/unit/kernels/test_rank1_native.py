"""Scales of rows times columns in C: the reference's bytes, whatever the shape and the instruction set."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.codebooks import fitted, ternary, unit_gain
from lowbit_strategy.kernels.format import BlockFormat, Rank1Format, uniform
from lowbit_strategy.kernels.reference import rank1 as reference
from lowbit_strategy.kernels.segments import Segment, Segments
from tests.unit.kernels.test_native import SPECIAL, assert_same_bytes, isa

pytestmark = pytest.mark.skipif(not native.available(), reason="the C extension is not built")

if native.available():
    from lowbit_strategy.kernels.native import rank1 as compiled

__all__ = ["isa"]

CODES = (
    *(uniform(bits, 64) for bits in (2, 3, 4, 8)),
    *(unit_gain(size, block_size) for size, block_size in ((2, 32), (2, 128), (3, 64), (4, 64), (8, 256))),
    fitted(4, 32),
    ternary(32),
    ternary(4096),
    BlockFormat(bits=1, block_size=64, scale_rule="mean_abs", codebook=(-1.0, 1.0)),
    BlockFormat(bits=5, block_size=64, scale_rule="rms", codebook=tuple((i - 10) / 8 for i in range(20))),
)


@dataclass(kw_only=True)
class Case:
    fmt: Rank1Format
    rows: list[int]
    gap: int
    dtype: torch.dtype
    special: list[float]
    seed: int
    residual: torch.dtype
    options: dict[str, object]

    def segments(self) -> Segments:
        places, x, state, wire = [], self.gap, 0, 0
        for index, rows in enumerate(self.rows):
            numel = rows * self.fmt.columns
            places.append(Segment(x, numel, state, wire, salt=index * 0x9E37))
            x += numel + self.gap
            state += (rows + self.gap) * self.fmt.columns
            wire += (self.fmt.wire_nbytes(numel) + 15) // 16 * 16 + 16 * self.gap
        return Segments(places)

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        last, columns = self.segments().rows[-1], self.fmt.columns
        numel = last.x_offset + last.numel + self.gap
        x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
        for index, value in enumerate(self.special):  # a row full of it, and one that has it once
            start = self.gap + index * 3 * columns
            x[start : start + columns] = value
            x[start + 2 * columns : start + 2 * columns + 1] = value
        x[self.gap :: columns] *= 0.0 if self.seed % 3 == 0 else 1.0  # a column of zeros in the first message
        rows = last.state_offset // columns + self.rows[-1] + 1
        scale = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.2)
        int8 = torch.randint(-127, 128, (rows * columns,), generator=generator, dtype=torch.int8)
        floats = torch.randn(rows * columns, generator=generator)
        is_int8 = self.residual == torch.int8
        return {
            "x": x.to(self.dtype),
            "residual": int8 if is_int8 else floats,
            "residual_scale": scale.to(torch.bfloat16) if is_int8 else torch.empty(0),
            "wire": torch.full((last.wire_offset + self.fmt.wire_nbytes(last.numel) + 16,), 0xA5, dtype=torch.uint8),
            "flag": torch.zeros(1, dtype=torch.int32),
        }


@st.composite
def cases(draw: st.DrawFn) -> Case:
    codes = draw(st.sampled_from(CODES))
    return Case(
        fmt=Rank1Format(codes=codes, columns=draw(st.sampled_from((1, 3, 16, 17, 63, 64, 65, 130, 300, 1000, 5000)))),
        rows=draw(st.lists(st.sampled_from((0, 1, 2, 3, 4, 5, 7, 8, 13, 22)), min_size=1, max_size=3)),
        gap=draw(st.sampled_from((0, 1, 5))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        special=draw(st.lists(st.sampled_from(SPECIAL), max_size=4)),
        seed=draw(st.integers(0, 2**32 - 1)),
        residual=draw(st.sampled_from((torch.int8, torch.float32))),
        options={
            "reset": draw(st.booleans()),
            "stochastic": codes.is_uniform and draw(st.booleans()),
            "stochastic_residual": draw(st.booleans()),
            "beta": draw(st.sampled_from((0.0, 0.8, 0.95))),
        },
    )


examples = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


@examples
@given(case=cases())
def test_loco_encode_writes_the_references_bytes(isa: str, case: Case) -> None:
    wanted, found, segments = case.tensors(), case.tensors(), case.segments()
    for module, at in ((reference, wanted), (compiled, found)):
        scale = at["residual_scale"] if case.residual == torch.int8 else None
        module.loco_encode_(
            at["x"], at["residual"], scale, at["wire"], segments, case.fmt, seed=case.seed, flag=at["flag"],
            **case.options,
        )  # fmt: skip
    assert_same_bytes(found, wanted)


@examples
@given(case=cases(), num_sources=st.sampled_from((1, 2, 3, 20)), alpha=st.sampled_from((1.0, 0.25, 1 / 3)))
def test_encode_and_decode_sum_write_the_references_bytes(
    isa: str,
    case: Case,
    num_sources: int,
    alpha: float,
) -> None:
    wanted, found, segments = case.tensors(), case.tensors(), case.segments()
    stochastic = bool(case.options["stochastic"])
    for module, at in ((reference, wanted), (compiled, found)):
        module.encode_(at["x"], at["wire"], segments, case.fmt, stochastic=stochastic, seed=case.seed, flag=at["flag"])
    assert_same_bytes(found, wanted)

    generator = torch.Generator().manual_seed(case.seed)
    wire_WB = wanted["wire"].repeat(num_sources, 1)
    codes = case.fmt.codes
    for row in segments.rows:  # other codes, the same scales
        stop = row.wire_offset + codes.num_blocks(row.numel) * codes.code_nbytes
        if codes.is_uniform or codes.is_ternary or len(codes.codebook or ()) == 2**codes.bits:
            size = (num_sources, stop - row.wire_offset)
            random = torch.randint(0, 243 if codes.is_ternary else 256, size, generator=generator)
            wire_WB[1:, row.wire_offset : stop] = random[1:].to(torch.uint8)
    for module, at in ((reference, wanted), (compiled, found)):
        module.decode_sum_(wire_WB, at["x"], segments, case.fmt, alpha=alpha)
    same = found["x"].view(torch.uint8) == wanted["x"].view(torch.uint8)
    both_nan = (found["x"].isnan() & wanted["x"].isnan()).repeat_interleave(wanted["x"].element_size())
    assert bool((same | both_nan).all())  # which NaN a half-precision cast gives differs between processors


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    fmt, before = Rank1Format(codes=unit_gain(4, 128), columns=300), torch.get_num_threads()
    case = Case(
        fmt=fmt, rows=[400, 300, 500, 10, 300], gap=1, dtype=torch.float32, special=[], seed=1, residual=torch.int8,
        options={"beta": 0.8, "reset": False, "stochastic": False, "stochastic_residual": True},
    )  # fmt: skip
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(at := case.tensors())
            compiled.loco_encode_(
                at["x"], at["residual"], at["residual_scale"], at["wire"], case.segments(), fmt, seed=3,
                flag=at["flag"], **case.options,
            )  # fmt: skip
            compiled.decode_sum_(at["wire"][None], at["x"], case.segments(), fmt, alpha=0.5)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bytes(other, results[0])


def test_a_buffer_that_ends_before_a_message_is_refused() -> None:
    fmt = Rank1Format(codes=uniform(4, 128), columns=30)
    segments, flag = Segments([Segment(0, 300, 0, 0)]), torch.zeros(1, dtype=torch.int32)
    wire = torch.zeros(fmt.wire_nbytes(300), dtype=torch.uint8)
    with pytest.raises(ValueError, match="segments reach element 300"):
        compiled.encode_(torch.zeros(299), wire, segments, fmt, stochastic=False, seed=0, flag=flag)
    with pytest.raises(ValueError, match="segments reach element 300"):
        compiled.decode_sum_(wire[None, 1:], torch.zeros(300), segments, fmt, alpha=1.0)
    with pytest.raises(ValueError, match="multiple of the block size 30"):
        compiled.loco_encode_(
            torch.zeros(300), torch.zeros(600), None, wire, Segments([Segment(0, 300, 64, 0)]), fmt, beta=0.0,
            reset=False, stochastic=False, stochastic_residual=False, seed=0, flag=flag,
        )  # fmt: skip
