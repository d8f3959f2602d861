"""The Triton kernels compiled for GPUs that are not there: registers, spills, width of the accesses."""

from __future__ import annotations

import re

import pytest
import torch

from lowbit_strategy.kernels.codebooks import unbiased_lloyd_max
from lowbit_strategy.kernels.format import BlockFormat, DenseFormat, e2m1, ternary, uniform

pytest.importorskip("triton", reason="triton is not installed")

from lowbit_strategy.kernels.triton.layout import How, decode_launch, device_format, encode_launch
from testing.kernels import offline
from testing.kernels.cases import FITTED_2, codebook_format

ARCHITECTURES = (80, 90)
FORMATS = {"uniform4": uniform(4, 128), "uniform8": uniform(8, 128), "uniform2": uniform(2, 128)}
FORMATS["fitted2"] = codebook_format(2, FITTED_2)
# Registers that leave room for so many programs on a multiprocessor.
FOUR_PROGRAMS, THREE_PROGRAMS, TWO_PROGRAMS = 128, 168, 255


def loco(fmt: BlockFormat, x: str, arch: int, *, dithered: bool = False) -> offline.Resources:
    launch = encode_launch(device_format(fmt), torch.int8, How(stochastic_residual=dithered))
    return offline.encode_resources(fmt, x=x, residual="int8", launch=launch, arch=arch, stochastic_residual=dithered)


def check(found: offline.Resources, registers: int = FOUR_PROGRAMS) -> None:
    assert found.stack_nbytes == 0, "registers spill"
    assert found.local_nbytes == 0, "an array lies in local memory"
    assert found.registers <= registers


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", ["uniform4", "fitted2", "uniform8", "uniform2"])
def test_loco_keeps_everything_in_registers(name: str, arch: int) -> None:
    found = loco(FORMATS[name], "float32", arch)
    check(found, THREE_PROGRAMS if name == "fitted2" else FOUR_PROGRAMS)  # it varies with Triton's version
    # No value crosses warps, so no warp waits for another, but for one number of a block where it has four parts
    assert found.shared_nbytes == (512 if name == "uniform2" else 0)
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", found.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_loco_bfloat16_and_dither(arch: int) -> None:
    for found in (
        loco(FORMATS["uniform4"], "bfloat16", arch),
        loco(FORMATS["uniform4"], "float32", arch, dithered=True),
    ):
        check(found)
        assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", found.ptx)
        assert re.search(r"st\.global(\.\w+)*\.v[24]\.b32", found.ptx)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("sources", [2, 8])
def test_decode_sum_keeps_everything_in_registers(sources: int, arch: int) -> None:
    fmt = FORMATS["uniform4"]
    launch = decode_launch(device_format(fmt))
    found = offline.decode_sum_resources(fmt, out="float32", sources=sources, launch=launch, arch=arch)
    check(found)
    assert re.search(r"st\.global(\.\w+)*\.v4\.b32", found.ptx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "many", "few"),
    [
        ("uniform4", 128, 16),
        ("uniform4", 67, 11),
        ("fitted2", 128, 16),
        ("fitted2", 67, 11),
    ],
)
def test_the_decoders_code_does_not_grow_with_the_number_of_ranks(name: str, many: int, few: int) -> None:
    """Unrolled over 128 sources it took minutes to compile. Whole groups are added in a loop at run time."""
    fmt = FORMATS[name]
    launch = decode_launch(device_format(fmt))

    def decode(sources: int) -> offline.Resources:
        return offline.decode_sum_resources(fmt, out="float32", sources=sources, launch=launch, arch=90)

    found = decode(many)
    assert found.ptx == decode(few).ptx  # one kernel serves both
    check(found)
    assert found.ptx.count("ld.global") <= 2 * decode(8).ptx.count("ld.global")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_dense_kernels_keep_everything_in_registers(wire: str, arch: int) -> None:
    fmt = DenseFormat(wire)  # type: ignore[arg-type]
    check(offline.dense_encode_resources(fmt, x="float32", arch=arch))
    many = offline.dense_decode_sum_resources(fmt, out="float32", sources=128, arch=arch)
    check(many)
    assert many.ptx == offline.dense_decode_sum_resources(fmt, out="float32", sources=16, arch=arch).ptx
    assert re.search(r"ld\.global(\.\w+)*\.v[24]\.b32", many.ptx)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fmt", "registers"),
    [
        (ternary(128), THREE_PROGRAMS),
        (unbiased_lloyd_max(3, 64), THREE_PROGRAMS),
        (e2m1(128), THREE_PROGRAMS),
        (codebook_format(4, tuple(i / 8 for i in range(-7, 9))), TWO_PROGRAMS),
    ],
)
def test_codebooks_of_every_size(fmt: BlockFormat, registers: int) -> None:
    """The interpreter runs what the compiler refuses, such as comparisons of tuples and code behind a return."""
    launch = decode_launch(device_format(fmt))
    check(offline.decode_sum_resources(fmt, out="float32", sources=2, launch=launch, arch=90), registers=THREE_PROGRAMS)
    check(loco(fmt, "float32", 90), registers=registers)


def test_only_exact_products_are_contracted() -> None:
    """At 8 bits one per element, of the code and its scale, and two for the inverse of a scale, as if divided."""
    launch = encode_launch(device_format(FORMATS["uniform8"]), torch.int8)
    whole, small = (shape.rows * 128 for shape in launch.shapes(device_format(FORMATS["uniform8"])))
    per_thread = (whole + small) // (32 * launch.num_warps)
    of_inverses = 2 * 4  # two scales, in whole tiles and in pieces
    assert loco(FORMATS["uniform8"], "float32", 90).ptx.count("fma.") == per_thread + of_inverses


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("size", [32, 128])
def test_a_rotation_needs_no_other_warp(size: int, arch: int) -> None:
    found = offline.rotate_resources(size, inverse=True, arch=arch)
    check(found, registers=64)
    assert found.wide_share > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_chunk_top_k_keeps_its_chunk_in_registers(arch: int) -> None:
    found = offline.chunk_top_k_resources(arch=arch)
    check(found, FOUR_PROGRAMS)
    assert re.search(r"ld\.global(\.\w+)*\.v4\.b32", found.ptx)
