"""The kernels: do they compile, are their bytes right; DDP's hook on one rank."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.gpu_acceptance.checks import Check, Figures, LeftOut
from benchmarks.gpu_acceptance.processes import run_python
from lowbit_strategy.kernels import backends
from lowbit_strategy.kernels.blocks import decode_sum_, encode_
from lowbit_strategy.kernels.feedback import Feedback
from lowbit_strategy.kernels.format import DenseFormat, uniform
from lowbit_strategy.kernels.segments import Segment, Segments
from testing.kernels.row_cases import LARGE_ROTATIONS, ROTATIONS, check_chunks, check_rotations

REPOSITORY = Path(__file__).resolve().parents[2]
NUMEL = 1 << 16


def python(*arguments: str, timeout: float, prefix: tuple[str, ...] = (), **env: str) -> str:
    """Standard output of a Python process in the repository's folder; its errors are an exception."""
    variables = {"PYTHONPATH": str(REPOSITORY), **env}
    return run_python([*prefix, sys.executable, *arguments], timeout, variables, REPOSITORY)


def need_pytest() -> None:
    if find_spec("pytest") is None:
        raise LeftOut("pytest is not installed")


def compile_all(device: torch.device) -> Figures:
    """Every kernel that default settings run, once, on floats of every type; on a GPU Triton compiles them."""
    start = time.perf_counter()
    segments, count = Segments([Segment(0, NUMEL, 0, 0)]), 0
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(NUMEL, device=device, dtype=dtype)
        for bits in (4, 8):
            fmt = uniform(bits, 128)
            wire = torch.zeros(fmt.wire_nbytes(NUMEL), dtype=torch.uint8, device=device)
            residual = torch.zeros(NUMEL, dtype=torch.int8, device=device)
            scale = torch.zeros(NUMEL // 128, dtype=torch.bfloat16, device=device)
            encode_(x, wire, segments, fmt, flag=flag, feedback=Feedback(residual, scale, 0.8))
            encode_(x, wire, segments, fmt, flag=flag)
            decode_sum_(wire.view(1, -1), x.clone(), segments, fmt)
            decode_sum_(wire.expand(2, -1).contiguous(), x.clone(), segments, fmt)
            count += 4
        exact = torch.zeros(4 * NUMEL, dtype=torch.uint8, device=device)
        encode_(x, exact, segments, DenseFormat("float32"), flag=flag)
        decode_sum_(exact.view(1, -1), x.clone(), segments, DenseFormat("float32"))
        count += 2
    if bool(flag):
        raise AssertionError("finite numbers were taken for inf or NaN")
    return {"kernels": count, "by": backends.describe(device), "seconds": time.perf_counter() - start}


def bytes_of_rows(device: torch.device) -> Figures:
    """Rotation, which LoCo without a residual has, and the largest of chunks. On a CPU in Triton's interpreter."""
    if device.type == "cuda":
        from lowbit_strategy.methods.zoo.kernels.triton import chunk_top_k, rotation

        wrong = check_rotations(rotation, "cuda", ROTATIONS + LARGE_ROTATIONS) + check_chunks(chunk_top_k, "cuda")
    else:
        lines = python("-W", "ignore", "-m", "testing.kernels.triton_worker", "rows", "0", "1", timeout=280)
        wrong = [line for line in lines.splitlines() if line != "cases: 2"]
    assert not wrong, "\n".join(wrong)
    return {"kernels": "rotation, largest of chunks"}


def bytes_of_kernels(device: torch.device) -> Figures:
    """On a GPU all cases of tests/gpu; on a CPU some of them in Triton's interpreter."""
    if device.type == "cuda":
        need_pytest()
        side_by_side = ("-n", str(min(8, os.cpu_count() or 1))) if find_spec("xdist") else ()
        tests = ("-m", "pytest", "-q", "-m", "gpu", *side_by_side, "tests/gpu")
        return {"pytest": python(*tests, timeout=400).splitlines()[-1]}  # nearly all of it is compiling
    lines: list[str] = []
    for arguments in (("core", "0", "24"), ("pairs", "0", "1")):
        lines += python("-W", "ignore", "-m", "testing.kernels.triton_worker", *arguments, timeout=280).splitlines()
    wrong = [line for line in lines if not line.startswith("cases:")]
    assert not wrong, "\n".join(wrong)
    return {"interpreter": "; ".join(lines)}


def hook_on_one_rank(device: torch.device) -> Figures:
    """DDP calls the hook on one rank too: the gradient is what its own message decodes to, bit for bit."""
    from benchmarks.gpu_acceptance.training import one_rank_matches, open_group

    start, compared = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        open_group("nccl" if device.type == "cuda" else "gloo", 0, 1, folder)
        try:
            for dtype in ("float32", "bfloat16", "float16"):
                for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
                    one_rank_matches(device, dtype, options)
                    compared.append(f"{dtype} {next(iter(options), 'plain')}")
        finally:
            dist.destroy_process_group()
    return {"compared": len(compared), "per_case_s": (time.perf_counter() - start) / len(compared)}


CHECKS = (
    Check(name="rotation and the largest of chunks are the reference's", run=bytes_of_rows),
    Check(name="every kernel is compiled and runs", run=compile_all),
    Check(name="DDP's hook on one rank", run=hook_on_one_rank),
    Check(name="bytes of the kernels are the reference's", run=bytes_of_kernels),
)
