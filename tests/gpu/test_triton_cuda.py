"""The Triton kernels on a real GPU against the reference on the CPU, bit for bit."""

from __future__ import annotations

import time

import pytest
import torch

from lowbit_strategy.advisor.measured import device_seconds_of
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.reference import blocks as reference_blocks
from lowbit_strategy.kernels.segments import Segment, Segments
from testing.kernels.cases import Case, cases, check_case, check_dense, check_sources
from testing.kernels.row_cases import LARGE_ROTATIONS, ROTATIONS, check_chunks, check_rotations

pytest.importorskip("triton", reason="triton is not installed")

BEYOND = 2**31 + 4096  # what 32 bits cannot address
FORMAT = uniform(4, 128)


@pytest.mark.parametrize("num_tiles", [1.3, 40.7])
@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_every_byte_is_the_references(case: Case, num_tiles: float) -> None:
    from lowbit_strategy.kernels.triton import blocks
    from lowbit_strategy.kernels.triton.layout import device_format, encode_launch

    tile = encode_launch(device_format(case.fmt), case.residual).tile(case.fmt.block_size)
    case = Case(**{**{name: getattr(case, name) for name in Case.__dataclass_fields__}, "num_tiles": num_tiles})
    assert check_case(case, blocks, tile, "cuda") == []


def test_sums_over_many_sources_are_the_references() -> None:
    from lowbit_strategy.kernels.triton import blocks

    assert check_sources(blocks, "cuda") == []


def test_dense_messages_are_the_references() -> None:
    from lowbit_strategy.kernels.triton import dense

    assert check_dense(dense, "cuda") == []


def test_rotations_are_the_references() -> None:
    from lowbit_strategy.methods.zoo.kernels.triton import rotation

    assert check_rotations(rotation, "cuda", ROTATIONS + LARGE_ROTATIONS) == []


def test_the_largest_of_chunks_are_the_references() -> None:
    from lowbit_strategy.methods.zoo.kernels.triton import chunk_top_k

    assert check_chunks(chunk_top_k, "cuda") == []


def test_offsets_beyond_32_bits() -> None:
    """Gradient, residual and wire all start past 2**31; the same piece from offset 0 is the reference."""
    numel, nbytes = 10_000, FORMAT.wire_nbytes(10_000)
    segments = Segments([Segment(BEYOND + 3, numel, BEYOND, BEYOND, 7)])
    here = Segments([Segment(0, numel, 0, 0, 7)])
    g = torch.randn(numel, generator=torch.Generator().manual_seed(0)).bfloat16()
    x = torch.empty(BEYOND + 3 + numel, dtype=torch.bfloat16, device="cuda")
    x[BEYOND + 3 :] = g.cuda()
    residual = torch.zeros(BEYOND + 10_240, dtype=torch.int8, device="cuda")
    scale = torch.zeros(residual.numel() // FORMAT.block_size, dtype=torch.bfloat16, device="cuda")
    wire = torch.empty(BEYOND + nbytes, dtype=torch.uint8, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    encode_(x, wire, segments, FORMAT, flag=flag, feedback=Feedback(residual, scale, 0.8))

    want_residual, want_wire = torch.zeros(10_240, dtype=torch.int8), torch.empty(nbytes, dtype=torch.uint8)
    want_scale = torch.zeros(80, dtype=torch.bfloat16)
    options = {"stochastic": False, "seed": 0, "flag": torch.zeros(1, dtype=torch.int32)}
    feedback = Feedback(want_residual, want_scale, 0.8)
    reference_blocks.encode_(g, want_wire, here, FORMAT, feedback=feedback, **options)
    assert torch.equal(wire[BEYOND:].cpu(), want_wire)
    assert torch.equal(residual[BEYOND:].cpu(), want_residual)
    assert torch.equal(scale[BEYOND // FORMAT.block_size :].cpu(), want_scale)


def test_a_segment_of_more_than_2_31_elements() -> None:
    """The last blocks of a huge tensor, encoded and decoded."""
    numel = BEYOND + 300
    x = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    last = numel // FORMAT.block_size * FORMAT.block_size - 8 * FORMAT.block_size
    x[last:] = torch.randn(numel - last, device="cuda")
    tail = x[last:].cpu()
    segments = Segments([Segment(0, numel, 0, 0)])
    wire = torch.empty(1, FORMAT.wire_nbytes(numel), dtype=torch.uint8, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    encode_(x, wire[0], segments, FORMAT, flag=flag)

    want = torch.empty(FORMAT.wire_nbytes(tail.numel()), dtype=torch.uint8)
    short = Segments([Segment(0, tail.numel(), 0, 0)])
    reference_blocks.encode_(
        tail, want, short, FORMAT, stochastic=False, seed=0, flag=torch.zeros(1, dtype=torch.int32)
    )
    num_blocks = FORMAT.num_blocks(tail.numel())
    codes_end = FORMAT.num_blocks(numel) * FORMAT.code_nbytes
    codes = wire[0, codes_end - num_blocks * FORMAT.code_nbytes : codes_end].cpu()
    assert torch.equal(codes, want[: num_blocks * FORMAT.code_nbytes])
    assert torch.equal(wire[0, -2 * num_blocks :].cpu(), want[-2 * num_blocks :])

    decode_sum_(wire, x, segments, FORMAT)
    want_tail = torch.empty_like(tail)
    reference_blocks.decode_sum_(want[None], want_tail, short, FORMAT, alpha=1.0)
    assert torch.equal(x[last:].cpu(), want_tail)
    assert not x[: 2**20].any()


def test_the_second_gpu_is_served_as_well() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = torch.randn(5000, device="cuda:1")
    segments = Segments([Segment(0, 5000, 0, 0)])
    wire = torch.zeros(1, FORMAT.wire_nbytes(5000), dtype=torch.uint8, device="cuda:1")
    encode_(x, wire[0], segments, FORMAT, flag=torch.zeros(1, dtype=torch.int32, device="cuda:1"))
    decoded = torch.empty_like(x)
    decode_sum_(wire, decoded, segments, FORMAT)
    assert (decoded - x).abs().max() <= x.abs().max() / 7 * 0.51


def test_the_devices_clock_does_not_count_the_host() -> None:
    x = torch.randn(1 << 20, device="cuda")

    def call() -> None:
        time.sleep(0.02)
        x.mul_(1.0)

    assert 0 < device_seconds_of(call, x.device) < 0.005


def test_capture_into_a_cuda_graph_is_refused() -> None:
    x, segments = torch.randn(5000, device="cuda"), Segments([Segment(0, 5000, 0, 0)])
    wire = torch.zeros(FORMAT.wire_nbytes(5000), dtype=torch.uint8, device="cuda")
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    encode_(x, wire, segments, FORMAT, flag=flag)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        encode_(x, wire, segments, FORMAT, flag=flag)
