"""The kernels' speed, compile time and memory accesses."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu_acceptance.checks import Check, Figures, LeftOut, Missed
from benchmarks.gpu_acceptance.kernels import need_pytest, python

COLD_COMPILE_BAR_S = 3.0  # of a decoder, at any number of ranks
COPY_BAR = 0.6  # of a copy's speed, for LoCo's encoder at 4 bits


def speed(device: torch.device) -> Figures:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "figures.json"
        python("benchmarks/gpu_kernels.py", "--numel", str(1 << 26), "--json", str(target), timeout=300)
        return fast_enough(json.loads(target.read_text()))


def fast_enough(figures: Figures) -> Figures:
    """The share of a copy that each kernel reaches.

    Raises:
        Missed: LoCo's encoder is too slow.
    """
    shares = {row["name"]: round(row["share_of_copy"], 2) for row in figures["rows"]}
    encoders = [share for name, share in shares.items() if name.startswith("loco 4bit") and "dithered" not in name]
    found = {"copy_gb_per_s": figures["copy_gb_per_s"], "loco_share_of_copy": min(encoders, default=0.0), **shares}
    if found["loco_share_of_copy"] < COPY_BAR:
        raise Missed(f"LoCo's encoder reaches {encoders} of a copy's speed, {COPY_BAR} is wanted", found)
    return found


def cold_compile(device: torch.device) -> Figures:
    """Each in a process of its own with an empty cache, for this GPU or, on a CPU, for sm_90."""
    major, minor = torch.cuda.get_device_capability() if device.type == "cuda" else (9, 0)
    seconds = {}
    for sources in (8, 64):
        with tempfile.TemporaryDirectory() as cache:
            script = (
                "import sys, time, torch\n"
                "from lowbit_strategy.kernels.format import uniform\n"
                "from testing.kernels import offline\n"
                "from lowbit_strategy.kernels.triton.layout import device_format\n"
                "from lowbit_strategy.kernels.triton.layout import decode_launch\n"
                "fmt = uniform(4, 128)\n"
                "launch = decode_launch(device_format(fmt))\n"
                "start = time.process_time()\n"
                f"offline.decode_sum_resources(fmt, out='float32', sources={sources}, launch=launch,"
                f" arch={10 * major + minor})\n"
                "print(time.process_time() - start)\n"
            )
            seconds[f"W={sources}_s"] = float(python("-c", script, timeout=120, TRITON_CACHE_DIR=cache))
    if max(seconds.values()) > COLD_COMPILE_BAR_S:
        raise Missed(f"{seconds}, at most {COLD_COMPILE_BAR_S} s are allowed", seconds)
    return seconds


def sanitizer(device: torch.device) -> Figures:
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        raise LeftOut("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    need_pytest()
    cases = "uniform4-1.3 or fitted2-1.3 or dense_messages"
    for kind in ("memcheck", "racecheck"):
        prefix = (tool, "--tool", kind, "--error-exitcode", "9", "--target-processes", "all")
        tests = ("-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", cases)
        # torch's own blocks are larger than tensors: memcheck would not see what is read behind one
        python(*tests, timeout=120, prefix=prefix, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    return {"tools": "memcheck, racecheck", "cases": cases}


CHECKS = (
    Check(name="cold compile of the decoder", run=cold_compile),
    Check(name="speed as a share of a copy", run=speed, gpu_only="the kernels' speed is a GPU's"),
    Check(name="memory and race checks", run=sanitizer, gpu_only="compute-sanitizer watches a GPU's memory"),
)
