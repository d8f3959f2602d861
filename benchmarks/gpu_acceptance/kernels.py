"""Part 1: the kernels' bytes, memory accesses, speed and compile time; DDP's hook on one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gpu_acceptance.checks import Check, Figures

REPOSITORY = Path(__file__).resolve().parents[2]
COLD_COMPILE_BAR_S = 3.0  # of a decoder, at any number of ranks


def python(*arguments: str, timeout: float, prefix: tuple[str, ...] = (), **env: str) -> str:
    """Standard output of a Python process in the repository's folder; its errors are an exception."""
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "benchmarks")))
    done = subprocess.run(
        [*prefix, sys.executable, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def bytes_of_kernels(device: torch.device) -> Figures:
    """On a GPU all cases of tests/gpu; on a CPU some of them in Triton's interpreter."""
    if device.type == "cuda":
        return {"pytest": python("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", timeout=400).splitlines()[-1]}
    worker, lines = "tests/unit/kernels/triton_interpreter_worker.py", []
    for arguments in (("core", "0", "6"), ("dense", "0", "1")):
        lines += python("-W", "ignore", worker, *arguments, timeout=280).splitlines()
    wrong = [line for line in lines if not line.startswith("cases:")]
    assert not wrong, "\n".join(wrong)
    return {"interpreter": "; ".join(lines)}


def sanitizer(device: torch.device) -> Figures:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise AssertionError("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    cases = "uniform4-1.3 or fitted2-1.3 or dense_messages"
    for kind in ("memcheck", "racecheck"):
        prefix = (tool, "--tool", kind, "--error-exitcode", "9", "--target-processes", "all")
        python("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", cases, timeout=200, prefix=prefix)
    return {"tools": "memcheck, racecheck", "cases": cases}


def speed(device: torch.device) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        python("benchmarks/gpu_kernels.py", "--numel", str(1 << 26), "--json", str(target), timeout=300)
        figures = json.loads(target.read_text())
    shares = {row["name"]: round(row["share_of_copy"], 2) for row in figures["rows"]}
    return {"copy_gb_per_s": figures["copy_gb_per_s"], **shares}


def cold_compile(device: torch.device) -> Figures:
    """Each in a process of its own with an empty cache, for this GPU or, on a CPU, for sm_90."""
    major, minor = torch.cuda.get_device_capability() if device.type == "cuda" else (9, 0)
    seconds = {}
    for sources in (8, 64):
        with tempfile.TemporaryDirectory() as cache:
            script = (
                "import sys, time, torch\n"
                "from lowbit_strategy.kernels.format import uniform\n"
                "from lowbit_strategy.kernels.triton import offline\n"
                "from lowbit_strategy.kernels.triton.layout import device_format\n"
                "from lowbit_strategy.kernels.triton.tiles import decode_launch\n"
                "fmt = uniform(4, 128)\n"
                "launch = decode_launch(device_format(fmt), torch.float32)\n"
                "start = time.process_time()\n"
                f"offline.decode_sum_resources(fmt, out='float32', sources={sources}, launch=launch,"
                f" arch={10 * major + minor})\n"
                "print(time.process_time() - start)\n"
            )
            seconds[f"W={sources}_s"] = float(python("-c", script, timeout=120, TRITON_CACHE_DIR=cache))
    assert max(seconds.values()) < COLD_COMPILE_BAR_S, seconds
    return seconds


def hook_on_one_rank(device: torch.device) -> Figures:
    """DDP calls the hook on one rank too: the gradient is what its own message decodes to, bit for bit."""
    from gpu_acceptance.training import one_rank_matches, open_group

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
    Check(name="bytes of the kernels are the reference's", run=bytes_of_kernels),
    Check(name="cold compile of the decoder", run=cold_compile),
    Check(name="DDP's hook on one rank", run=hook_on_one_rank),
    Check(name="memory and race checks", run=sanitizer, gpu_only="compute-sanitizer watches a GPU's memory"),
    Check(name="speed as a share of a copy", run=speed, gpu_only="the kernels' speed is a GPU's"),
)
