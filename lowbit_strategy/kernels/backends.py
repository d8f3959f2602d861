"""Chooses the implementation for a device: Triton on GPUs, C on CPUs, plain PyTorch without a compiler."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Literal

import torch

from lowbit_strategy.kernels import native

Backend = Literal["triton", "native", "torch"]
# torch | native | triton: for tests and benchmarks, and to rule out a kernel when looking for a bug
OVERRIDE = "LOWBIT_KERNELS"


@cache
def triton_available() -> bool:
    return find_spec("triton") is not None


def describe(device: torch.device) -> str:
    """Describe the backend for `device`, and what would be faster, for reports."""
    backend = choose(device)
    if backend == "native":
        return f"native C ({native.isa()})"
    if backend == "torch":
        return "plain PyTorch (slower: the C extension is not built, reinstall with a C compiler)"
    return "Triton"


def choose(device: torch.device) -> Backend:
    """Choose the backend for tensors on `device`.

    Raises:
        RuntimeError: The device is a GPU without Triton, a CUDA graph is being captured, or the environment asks for a
            backend that does not support the device.
    """
    asked = os.environ.get(OVERRIDE)
    if device.type == "cpu" and asked is None:
        return "native" if native.available() else "torch"
    if device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "gradients are being compressed while a CUDA graph is captured: every replay would repeat this step's seed"
            " and residual reset; capture forward and backward only, or train without CUDA graphs"
        )
    if asked is not None:
        return _asked_for(asked, device)
    if device.type == "cuda":
        if not triton_available():
            raise RuntimeError(
                "gradients are on a GPU but Triton is missing: install PyTorch's build for CUDA, which includes it"
                " (https://pytorch.org/get-started/locally)"
            )
        return "triton"
    raise RuntimeError(f"no kernels for device type {device.type!r}: use CPU or CUDA")


@cache
def implementation(stem: str, backend: Backend) -> ModuleType:
    """Import the backend's module called `stem`; every backend has the same functions in it.

    It is imported only when needed, since not every machine has Triton. In C, unquantized floats are just another
    format.
    """
    if backend == "native" and stem == "dense":
        stem = "blocks"
    return import_module(f"lowbit_strategy.kernels.{'reference' if backend == 'torch' else backend}.{stem}")


def is_native(device: torch.device) -> bool:
    """Whether the C kernels handle tensors on `device`."""
    return device.type == "cpu" and choose(device) == "native"


def _asked_for(asked: str, device: torch.device) -> Backend:
    match asked:
        case "torch":
            return "torch"
        case "native":
            if device.type != "cpu":
                raise RuntimeError(f"{OVERRIDE}=native supports CPUs only, but the gradients are on {device}: unset it")
            if not native.available():
                raise RuntimeError(f"{OVERRIDE}=native, but the C extension is not built: reinstall with a C compiler")
            return "native"
        case "triton":
            if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
                raise RuntimeError(
                    f"{OVERRIDE}=triton supports GPUs only, but the gradients are on the CPU: unset it, or set"
                    " TRITON_INTERPRET=1 to run the kernels in Triton's interpreter"
                )
            return "triton"
    raise RuntimeError(f"{OVERRIDE}={asked!r} is not one of torch, native, triton")
