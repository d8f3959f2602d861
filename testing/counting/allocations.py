"""The allocator's count of this process: what is allocated, and the most since a reset."""

from __future__ import annotations

import ctypes
import functools
import gc
import subprocess
import sysconfig
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".c")


def build(folder: Path) -> Path:
    """The library that counts, to be put into ``LD_PRELOAD`` of processes that start.

    Raises:
        subprocess.CalledProcessError: It cannot be compiled here.
    """
    library = folder / "count.so"
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    if not hasattr(library, "lowbit_allocated"):
        raise RuntimeError("this process was not started with the counting library in LD_PRELOAD")
    for name in ("lowbit_allocated", "lowbit_peak"):
        getattr(library, name).restype = ctypes.c_long
    return library


def allocated(device: torch.device) -> int:
    """Bytes, now."""
    gc.collect()
    return int(torch.cuda.memory_allocated(device) if device.type == "cuda" else _library().lowbit_allocated())


def peak(device: torch.device) -> int:
    """Bytes at most since `reset_peak`."""
    return int(torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _library().lowbit_peak())


def reset_peak(device: torch.device) -> None:
    """From now on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        _library().lowbit_reset_peak()
