"""Messages, values and residuals that kernels are compared on, and the comparisons: C against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat
from lowbit_strategy.kernels.segments import Segment, Segments

SPECIAL = (0.0, -0.0, 1e-45, 1e-40, 1.2e-38, 1e30, 3e38, 3.4e38, float("inf"), float("-inf"), float("nan"))
examples = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)


@dataclass(kw_only=True)
class Case:
    fmt: BlockFormat
    numels: list[int]
    gap: int
    dtype: torch.dtype
    special: list[float]
    seed: int
    residual: torch.dtype
    options: dict[str, Any]

    def segments(self) -> Segments:
        rows, x, state, wire = [], self.gap, 0, 0
        for index, numel in enumerate(self.numels):
            rows.append(Segment(x, numel, state, wire, salt=index * 0x9E37))
            x += numel + self.gap
            state += (self.fmt.num_blocks(numel) + self.gap) * self.fmt.block_size
            wire += (self.fmt.wire_nbytes(numel) + 15) // 16 * 16 + 16 * self.gap
        return Segments(rows)

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        last, size = self.segments().rows[-1], self.fmt.block_size
        numel = last.x_offset + last.numel + self.gap
        x = torch.randn(numel, generator=generator) * torch.exp(3 * torch.randn(numel, generator=generator))
        for index, value in enumerate(self.special):  # a block full of it, and one that has it once
            start = self.gap + index * 3 * size
            x[start : start + size] = value
            x[start + 2 * size : start + 2 * size + 1] = value
        blocks = last.state_offset // size + self.fmt.num_blocks(last.numel) + 1
        scale = torch.rand(blocks, generator=generator) * (torch.rand(blocks, generator=generator) > 0.2)
        int8 = torch.randint(-127, 128, (blocks * size,), generator=generator, dtype=torch.int8)
        floats = torch.randn(blocks * size, generator=generator)
        is_int8 = self.residual == torch.int8
        return {
            "x": x.to(self.dtype),
            "residual": int8 if is_int8 else floats,
            "residual_scale": scale.to(torch.bfloat16) if is_int8 else torch.empty(0),
            "wire": torch.full((last.wire_offset + self.fmt.wire_nbytes(last.numel) + 16,), 0xA5, dtype=torch.uint8),
            "flag": torch.zeros(1, dtype=torch.int32),
        }


def make_case(draw: st.DrawFn, fmt: BlockFormat, numels: Sequence[int]) -> Case:
    """A case of this format and these messages, all else drawn."""
    return Case(
        fmt=fmt,
        numels=list(numels),
        gap=draw(st.sampled_from((0, 1, 5))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        special=draw(st.lists(st.sampled_from(SPECIAL), max_size=4)),
        seed=draw(st.integers(0, 2**32 - 1)),
        residual=draw(st.sampled_from((torch.int8, torch.float32))),
        options={
            "reset": draw(st.booleans()),
            "stochastic": fmt.is_uniform and draw(st.booleans()),
            "stochastic_residual": draw(st.booleans()),
            "beta": draw(st.sampled_from((0.0, 0.8, 0.95))),
        },
    )


def assert_same_bytes(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def encode_with_feedback(module: ModuleType, case: Case, at: dict[str, Tensor], segments: Segments) -> None:
    scale, chosen = at["residual_scale"] if case.residual == torch.int8 else None, case.options
    feedback = Feedback(at["residual"], scale, chosen["beta"], chosen["reset"], chosen["stochastic_residual"])
    options = {"stochastic": chosen["stochastic"], "seed": case.seed, "flag": at["flag"], "feedback": feedback}
    module.encode_(at["x"], at["wire"], segments, case.fmt, **options)


def compare_loco_encode(reference: ModuleType, compiled: ModuleType, case: Case) -> None:
    """Message, residual and flag are the same bytes."""
    wanted, found, segments = case.tensors(), case.tensors(), case.segments()
    for module, at in ((reference, wanted), (compiled, found)):
        encode_with_feedback(module, case, at, segments)
    assert_same_bytes(found, wanted)


def compare_encode_and_decode(
    reference: ModuleType, compiled: ModuleType, case: Case, num_sources: int, alpha: float
) -> None:
    """Message and flag are the same bytes, and so is the sum of several ranks' messages."""
    wanted, found, segments = case.tensors(), case.tensors(), case.segments()
    stochastic = bool(case.options["stochastic"])
    for module, at in ((reference, wanted), (compiled, found)):
        module.encode_(at["x"], at["wire"], segments, case.fmt, stochastic=stochastic, seed=case.seed, flag=at["flag"])
    assert_same_bytes(found, wanted)

    generator = torch.Generator().manual_seed(case.seed)
    wire_WB, codes = wanted["wire"].repeat(num_sources, 1), case.fmt
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
