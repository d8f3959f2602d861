"""What a launch costs the host, and that later launches of a table hand the GPU what the first one did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if torch.cuda.is_available():
    pytest.skip("kernels would be compiled for another GPU", allow_module_level=True)

from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, Format, uniform
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.kernels.triton import blocks, dense
from testing.cuda.stub_driver import calls_of, launches

KERNELS = blocks.encode_kernel, blocks.decode_sum_kernel, dense.encode_kernel, dense.decode_sum_kernel
NUMEL, SOURCES = 1 << 13, 3
FLAG = torch.zeros(1, dtype=torch.int32)
LoCo4 = uniform(4, 128)


def _messages(fmt: Format, shift: int) -> torch.Tensor:
    nbytes = fmt.num_blocks(NUMEL) * (fmt.code_nbytes + 2) if isinstance(fmt, BlockFormat) else NUMEL * fmt.code_nbytes
    row = -(-nbytes // 16) * 16
    return torch.zeros(SOURCES * row + 16, dtype=torch.uint8)[shift : SOURCES * row + shift].view(SOURCES, row)


def _encode(segments: Segments, shift: int, seed: int) -> None:
    residual = torch.zeros(NUMEL, dtype=torch.int8), torch.zeros(NUMEL // 128, dtype=torch.bfloat16)
    feedback = Feedback(*residual, 0.8, reset=seed % 2 == 0, stochastic=False)
    x, wire = torch.zeros(NUMEL, dtype=torch.bfloat16), _messages(LoCo4, shift)[0]
    blocks.encode_(x, wire, segments, LoCo4, stochastic=False, seed=seed, flag=FLAG, feedback=feedback)


def _decode(segments: Segments, shift: int, seed: int) -> None:
    blocks.decode_sum_(_messages(LoCo4, 0), torch.zeros(NUMEL), segments, LoCo4, alpha=1.0 / seed)


def _dense_encode(segments: Segments, shift: int, seed: int) -> None:
    fmt = DenseFormat("float32")
    dense.encode_(torch.zeros(NUMEL), _messages(fmt, shift)[0], segments, fmt, flag=FLAG)


def _dense_decode(segments: Segments, shift: int, seed: int) -> None:
    fmt = DenseFormat("float32")
    dense.decode_sum_(_messages(fmt, shift), torch.zeros(NUMEL), segments, fmt, alpha=1.0 / seed)


CALLS: list[tuple[Callable[[Segments, int, int], None], bool]] = [  # whether the code knows that the wire is aligned
    (_encode, True),
    (_decode, False),
    (_dense_encode, True),
    (_dense_decode, True),
]


@pytest.mark.parametrize(("call", "is_told"), CALLS, ids=["encode", "decode", "dense encode", "dense decode"])
def test_later_launches_are_those_that_triton_makes(call: Callable[[Segments, int, int], None], is_told: bool) -> None:
    segments = Segments([Segment(0, NUMEL, 0, 0, 1)])
    with launches(*KERNELS) as launched:
        for seed in (5, 6, 7):
            call(segments, 0, seed)
        call(segments, 4, 8)  # of another alignment: code of its own
        call(segments, 0, 9)
        call(Segments(segments.rows), 0, 9)  # as Triton launches it
    assert {(each.grid, each.stream) for each in launched} == {(launched[0].grid, 7)}
    same, other, made_anew = {launched[i].function for i in (0, 1, 2, 4)}, launched[3].function, launched[5].function
    assert same == {made_anew}
    assert (other not in same) is is_told
    kinds = [[type(value) for value in each.arguments] for each in launched]
    assert all(kind == kinds[0] for kind in kinds)
    plain = [[value for value in each.arguments if not isinstance(value, torch.Tensor)] for each in launched]
    assert plain[4] == plain[5]


def test_a_launch_takes_few_calls() -> None:
    """Of the third call with a table. What Triton does for each launch took 77 to 108."""
    segments = Segments([Segment(0, NUMEL, 0, 0, 1)])
    with launches(*KERNELS):
        for call, _ in CALLS:
            call(segments, 0, 5)
            assert calls_of(lambda call=call: call(segments, 0, 6)) <= 60
