"""The machine that is judged, and whether it has a GPU that nobody would notice was not used."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

ROOT = Path("/")


def device_here() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def driver(root: Path | None = None) -> str | None:
    """The first line of what NVIDIA's driver says about itself; None: there is no driver."""
    path = (ROOT if root is None else root) / "proc" / "driver" / "nvidia" / "version"
    try:
        return path.read_text().splitlines()[0]
    except (OSError, IndexError):
        return None


def unused_driver() -> str | None:
    """Why this run would judge the CPU of a machine with a GPU; None: it would not."""
    version = driver()
    if version is None or torch.cuda.is_available():
        return None
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    return (
        f"the machine has a driver ({version}), and torch {torch.__version__}, which {built}, does not use it: install"
        " a build of torch for this driver, or a newer driver, and look at CUDA_VISIBLE_DEVICES"
    )


def describe() -> dict[str, Any]:
    device = device_here()
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": name,
        "kind": device.type,
        "devices": torch.cuda.device_count() if device.type == "cuda" else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": driver() or "none",
        "python": platform.python_version(),
    }
