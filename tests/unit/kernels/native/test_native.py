"""The C kernels write the same bytes as the reference, whatever the format, the values and the instruction set."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit_strategy.kernels import backends, native
from lowbit_strategy.kernels.blocks import encode_
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import BlockFormat, e2m1, uniform
from lowbit_strategy.kernels.reference import blocks as reference_blocks
from lowbit_strategy.kernels.segments import Segment, Segments
from testing.kernels.native_cases import (
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

FITTED = {
    "1 bit": {"bits": 1, "scale_rule": "rms", "codebook": (-0.796875, 0.796875)},
    "1 bit mean": {"bits": 1, "scale_rule": "mean_abs", "codebook": (-1.0, 1.0)},
    "2 bits": {"bits": 2, "scale_rule": "rms", "codebook": (-1.5078125, -0.453125, 0.453125, 1.5078125)},
    "3 bits": {"bits": 3, "scale_rule": "rms", "codebook": (-2.0, -1.25, -0.75, -0.25, 0.25, 0.75, 1.25, 2.0)},
    "4 bits, 11 codebook": {"bits": 4, "scale_rule": "mean_abs", "codebook": tuple((i - 5) / 2 for i in range(11))},
    "3 bits, largest magnitude": {"bits": 3, "codebook": (-2.0, -0.875, 0.0, 0.75, 2.0)},
    "7 bits": {"bits": 7, "scale_rule": "rms", "codebook": tuple((i - 50) / 16 for i in range(100))},
    "ternary": {"bits": 2, "codebook": (-1.0, 0.0, 1.0)},
    "2 bits, own thresholds": {
        "bits": 2,
        "scale_rule": "rms",
        "codebook": (-1.71148681640625, -0.5130615234375, 0.5130615234375, 1.71148681640625),
        "thresholds": (-0.981597900390625, 0.0, 0.981597900390625),
    },
    "ternary, own thresholds": {
        "bits": 2,
        "scale_rule": "rms",
        "codebook": (-1.511444091796875, 0.0, 1.511444091796875),
        "thresholds": (-0.61199951171875, 0.61199951171875),
    },
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from((32, 64, 128, 256, 4096)))
    bits = draw(st.one_of(st.integers(2, 8), st.sampled_from(sorted(FITTED)), st.none()))
    if bits is None:
        fmt = e2m1(size)
    elif isinstance(bits, int):
        fmt = uniform(bits, size)
    else:
        fmt = BlockFormat(block_size=size, **FITTED[bits])  # type: ignore[arg-type]
    numels = draw(st.lists(st.sampled_from((0, 1, 31, 33, 128, 1000, 2500, 4097)), min_size=1, max_size=3))
    return make_case(draw, fmt, numels)


@examples
@given(case=cases())
def test_loco_encode_writes_the_references_bytes(isa: str, case: Case) -> None:
    compare_loco_encode(reference_blocks, native_blocks, case)


@examples
@given(case=cases(), num_sources=st.sampled_from((1, 2, 3, 20)), alpha=st.sampled_from((1.0, 0.25, 1 / 3)))
def test_encode_and_decode_sum_write_the_references_bytes(isa: str, case: Case, num_sources: int, alpha: float) -> None:
    compare_encode_and_decode(reference_blocks, native_blocks, case, num_sources, alpha)


def loco_once(x: Tensor, fmt: BlockFormat) -> list[Tensor]:
    padded = fmt.num_blocks(x.numel()) * fmt.block_size
    residual = torch.zeros(padded, dtype=torch.int8)
    scale = torch.zeros(padded // fmt.block_size, dtype=torch.bfloat16)
    wire, flag = torch.zeros(fmt.wire_nbytes(x.numel()), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    segments = Segments([Segment(0, x.numel(), 0, 0, salt=7)])
    feedback = Feedback(residual, scale, 0.8, stochastic=True)
    for _ in range(2):
        native_blocks.encode_(x, wire, segments, fmt, stochastic=True, seed=3, flag=flag, feedback=feedback)
    return [wire, residual, scale.view(torch.int16)]


@pytest.mark.parametrize("size", [32, 128])
def test_ties_of_e2m1(size: int, isa: str) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0, 1.0, 3.0, 6.0, 8.0]).repeat(24)[:256]
    x[::2] *= -1
    x[::size] = 12.0
    assert_same_bytes({"wire": encoded(native_blocks, x, size)}, {"wire": encoded(reference_blocks, x, size)})


def encoded(backend: ModuleType, x: Tensor, size: int) -> Tensor:
    fmt = e2m1(size)
    wire, flag = torch.zeros(fmt.wire_nbytes(x.numel()), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    segments = Segments([Segment(0, x.numel(), 0, 0, salt=7)])
    backend.encode_(x, wire, segments, fmt, stochastic=False, seed=0, flag=flag)
    return wire


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(loco_once(x, uniform(4, 128)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_flushing_subnormal_numbers_changes_no_byte() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 1e-37
    plain = loco_once(x, uniform(4, 64))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        flushed = loco_once(x, uniform(4, 64))
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, flushed, strict=True))


def test_offsets_beyond_2_to_the_31(tmp_path: Path, isa: str) -> None:
    """Sparse files stand for the buffers: only the pages that are touched exist."""
    far, numel, fmt = 2**31 + 4096, 1000, uniform(4, 128)
    state, nbytes = fmt.num_blocks(numel) * fmt.block_size, fmt.wire_nbytes(numel)

    def sparse(name: str, size: int, dtype: torch.dtype) -> Tensor:
        return torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=dtype)

    x, residual = sparse("x", far + numel, torch.float32), sparse("residual", far + state, torch.int8)
    wire, scale = sparse("wire", far + nbytes, torch.uint8), torch.zeros((far + state) // 128, dtype=torch.bfloat16)
    x[far:] = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    near, near_residual = x[far:].clone(), torch.zeros(state, dtype=torch.int8)
    near_scale = torch.zeros(state // 128, dtype=torch.bfloat16)
    near_wire, flag = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    options = {"stochastic": True, "seed": 3, "flag": flag}

    feedback = Feedback(near_residual, near_scale, 0.8, stochastic=True)
    whole = Segments([Segment(0, numel, 0, 0)])
    reference_blocks.encode_(near, near_wire, whole, fmt, feedback=feedback, **options)
    segments = Segments([Segment(far, numel, far, far)])
    feedback = Feedback(residual, scale, 0.8, stochastic=True)
    native_blocks.encode_(x, wire, segments, fmt, feedback=feedback, **options)
    assert torch.equal(wire[far:], near_wire)
    assert torch.equal(residual[far:], near_residual)
    assert torch.equal(scale[far // 128 :], near_scale)

    native_blocks.decode_sum_(wire[None], x, segments, fmt, alpha=1.0)
    reference_blocks.decode_sum_(near_wire[None], near, whole, fmt, alpha=1.0)
    assert torch.equal(x[far:], near)


def test_what_lies_outside_a_buffer_is_refused() -> None:
    fmt = uniform(4, 64)
    x, wire, flag = torch.zeros(128), torch.zeros(fmt.wire_nbytes(128), dtype=torch.uint8), torch.zeros(1)
    options = {"stochastic": False, "seed": 0, "flag": flag}
    with pytest.raises(ValueError, match="segments reach element 129"):
        native_blocks.encode_(x, wire, Segments([Segment(1, 128, 0, 0)]), fmt, **options)
    with pytest.raises(ValueError, match="wire byte"):
        native_blocks.encode_(x, wire[:-1], Segments([Segment(0, 128, 0, 0)]), fmt, **options)
    with pytest.raises(ValueError, match="negative"):
        native_blocks.encode_(x, wire, Segments([Segment(-1, 128, 0, 0)]), fmt, **options)
    residual, scale = torch.zeros(192, dtype=torch.int8), torch.zeros(3, dtype=torch.bfloat16)
    whole, apart = Segments([Segment(0, 128, 0, 0)]), Segments([Segment(0, 128, 32, 0)])
    with pytest.raises(ValueError, match="multiple of the block size"):
        native_blocks.encode_(x, wire, apart, fmt, feedback=Feedback(residual, scale, 0.8), **options)
    with pytest.raises(ValueError, match="which holds 64"):
        native_blocks.encode_(x, wire, whole, fmt, feedback=Feedback(residual[:64], scale, 0.8), **options)
    with pytest.raises(TypeError, match="bfloat16"):
        encode_(x, wire, whole, fmt, feedback=Feedback(residual, scale.float(), 0.8), **options)


def test_the_public_op_reaches_the_extension_and_names_a_wrong_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, x, flag = uniform(4, 64), torch.randn(100), torch.zeros(1, dtype=torch.int32)
    wires = []
    for backend in ("native", "torch"):
        monkeypatch.setenv(backends.OVERRIDE, backend)
        wires.append(torch.zeros(fmt.wire_nbytes(100), dtype=torch.uint8))
        encode_(x, wires[-1], Segments([Segment(0, 100, 0, 0)]), fmt, flag=flag)
    assert torch.equal(*wires)
    monkeypatch.setenv(backends.OVERRIDE, "native")
    monkeypatch.setenv(native.ISA_OVERRIDE, "mmx")
    with pytest.raises(RuntimeError, match="'mmx' is not one of"):
        encode_(x, wires[0], Segments([Segment(0, 100, 0, 0)]), fmt, flag=flag)


def test_scales_of_nan_are_computed_without_overflow(tmp_path: Path) -> None:
    """The bits of a NaN plus what rounds up to bfloat16 leave the range of signed numbers."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc, whose sanitizer looks at vectors too")
    sources = Path(native.__file__).parent
    program, driver = tmp_path / "nan_scales", Path(__file__).parent / "nan_scales.c"
    flags = ["-std=gnu11", "-O0", "-w", "-fsanitize=signed-integer-overflow", "-fno-sanitize-recover=all"]
    command = [compiler, *flags, f"-I{sources}", str(driver), "-lm", "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=240)
    if "ubsan" in built.stderr and built.returncode:
        pytest.skip("this gcc has no undefined behavior sanitizer")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["7fc00000", "7fc00000", "7fc00000", "00000000"]


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("name", ["1 bit", "2 bits", "ternary, own thresholds"])
def test_root_mean_squares_of_every_magnitude_are_the_references(isa: str, name: str, size: int) -> None:
    fmt = BlockFormat(block_size=size, **FITTED[name])  # type: ignore[arg-type]
    exponents = torch.arange(-149, 128)  # squares leave float32's range on both sides
    generator = torch.Generator().manual_seed(size)
    x_KB = torch.rand(len(exponents), size, generator=generator) * torch.exp2(exponents.double())[:, None]
    x_KB[:, 1::2] *= 2.0**-35  # parts whose squares are lost first
    x_N = x_KB.float().flatten()
    segments = Segments([Segment(0, x_N.numel() - 5, 0, 0)])
    wires = []
    for module in (reference_blocks, native_blocks):
        wire, flag = torch.zeros(fmt.wire_nbytes(x_N.numel()), dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        module.encode_(x_N, wire, segments, fmt, stochastic=False, seed=0, flag=flag)
        wires.append(wire)
    assert torch.equal(*wires)
