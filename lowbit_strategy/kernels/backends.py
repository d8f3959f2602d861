"""Which implementation serves a device: Triton on GPUs, C on CPUs, plain PyTorch where there is no compiler."""

from __future__ import annotations

import os
from typing import Literal

import torch

Backend = Literal["triton", "native", "torch"]
OVERRIDE = "LOWBIT_KERNELS"  # torch | native | triton: for tests and benchmarks, and to rule a kernel out in a hunt
CACHE_ELEMENTS = 65536  # piece of the plain PyTorch path: small enough for a cache, large enough to hide call overhead


def native_available() -> bool:
    from lowbit_strategy.kernels import native

    return native.available()


def triton_available() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def describe(device: torch.device) -> str:
    """For reports: what serves `device`, and what would be faster."""
    backend = choose(device)
    if backend == "native":
        from lowbit_strategy.kernels import native

        return f"native C ({native.isa()})"
    if backend == "torch":
        return "plain PyTorch (slower: the C extension is not built, reinstall with a C compiler)"
    return "Triton"


def choose(device: torch.device) -> Backend:
    """Backend for tensors on `device`.

    Raises:
        RuntimeError: On a GPU without Triton, or where the environment asks for a backend that cannot serve.
    """
    asked = os.environ.get(OVERRIDE)
    if asked is not None:
        if asked not in ("torch", "native", "triton"):
            raise RuntimeError(f"{OVERRIDE}={asked!r} is not one of torch, native, triton")
        if asked == "native" and not native_available():
            raise RuntimeError(f"{OVERRIDE}=native, but the C extension is not built: reinstall with a C compiler")
        return asked  # type: ignore[return-value]
    if device.type == "cpu":
        return "native" if native_available() else "torch"
    if device.type == "cuda":
        if not triton_available():
            raise RuntimeError("gradients are on a GPU but Triton is missing: pip install triton")
        return "triton"
    raise RuntimeError(f"no kernels for device type {device.type!r}: use CPU or CUDA")
