"""Instructions, registers, warps and accesses of the compiled code, as they were when last written down."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from testing.kernels.figures import GPUS, WORKS, cycles_of, figures_of, share_of_copy
from testing.kernels.offline import Resources

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[4] / "benchmarks/results/compiled_kernels.json").read_text()
)
OFTEN = {("loco, E2M1, bf16", 90)}
CASES = [
    pytest.param(name, arch, marks=[] if (name, arch) in OFTEN else [pytest.mark.slow])
    for name in WORKS
    for arch in GPUS
]


LEAST = {  # of a copy's speed on an H200
    "loco, 4 bits, bf16": 0.88,
    "loco, E2M1, bf16": 0.83,
    "sum of 8, 4 bits": 0.89,
    "sum of 8, E2M1": 0.86,
    "sum of 8, 8 bits": 0.92,
}


def test_what_is_written_down_is_fast_enough() -> None:
    shares = {name: RECORDED["kernels"][name]["sm_90"]["share"] for name in LEAST}
    assert {name: share for name, share in shares.items() if share < LEAST[name]} == {}


def test_every_kernel_is_written_down() -> None:
    assert {name: set(archs) for name, archs in RECORDED["kernels"].items()} == {
        name: {f"sm_{arch}" for arch in GPUS} for name in WORKS
    }


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_no_kernel_became_slower(name: str, arch: int) -> None:
    """Nor faster without being written down: ``python benchmarks/gpu_kernels.py --offline --json`` that file."""
    if triton.__version__ != RECORDED["triton"]:
        pytest.skip(f"what Triton {RECORDED['triton']} compiles was written down")
    found, wanted = figures_of(name, arch), RECORDED["kernels"][name][f"sm_{arch}"]
    assert found.instructions == pytest.approx(wanted["instructions"], rel=0.03)
    assert found.warps == wanted["warps"]
    assert found.registers == pytest.approx(wanted["registers"], abs=4)
    assert found.wide_share == pytest.approx(wanted["wide_share"], abs=0.02)
    assert found.share == pytest.approx(wanted["share"], abs=0.02)


def resources(sass: str) -> Resources:
    return Resources(registers=1, stack_nbytes=0, local_nbytes=0, shared_nbytes=0, threads=32, ptx="", sass=sass)


def test_a_loop_counts_as_often_as_it_runs_and_what_is_never_reached_does_not() -> None:
    lines = ["MOV R1, R2 ;", ".L_x_0:", "IADD3 R1, R1, 1, RZ ;", "@P0 BRA `(.L_x_0) ;", "@P1 BRA `(.L_x_1) ;"]
    lines += ["NOP ;", ".L_x_1:", "EXIT ;", ".L_x_2:", "BRA `(.L_x_2);", "NOP ;"]
    sass = "\n".join(line if line.startswith(".") else f"        /*{i:04x}*/   {line}" for i, line in enumerate(lines))
    assert resources(sass).executed((1,)).total() == 6
    assert resources(sass).executed((8,)) == {"MOV": 1, "IADD3": 8, "BRA": 9, "NOP": 1, "EXIT": 1}
    assert resources(sass).executed((0,)).total() == 4
    with pytest.raises(ValueError, match="the code has 1 loops"):
        resources(sass).executed()


def test_the_slowest_unit_bounds_a_kernel() -> None:
    """An integer instruction is issued in a cycle of 128 and runs in one of 64; an A100 has 64 of floats as well."""
    assert cycles_of(Counter(FADD=64, LOP3=64), GPUS[90]) == 1
    assert cycles_of(Counter(FADD=128), GPUS[90]) == 1
    assert cycles_of(Counter(FADD=128), GPUS[80]) == 2
    assert cycles_of(Counter(LOP3=128), GPUS[90]) == 2
    assert cycles_of(Counter(I2F=32, NOP=1), GPUS[90]) == 2
    assert cycles_of(Counter(LDG=64), GPUS[90]) == 2


def test_a_share_falls_with_instructions_and_rises_with_bytes() -> None:
    gpu = GPUS[90]
    assert share_of_copy(0, 4, gpu) == 1
    assert share_of_copy(0.2, 4, gpu) > share_of_copy(0.4, 4, gpu)
    assert share_of_copy(0.2, 8, gpu) == pytest.approx(share_of_copy(0.1, 4, gpu))
