"""How long a device takes for what it is asked to do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

_AHEAD = 2.0  # times as long as the host needs to ask for what is timed, a GPU is kept busy


def finish(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes until the device has done what it asks for."""
    finish(device)
    began = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - began


def device_seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long the device works for a call.

    A GPU does what the host has asked for while the host asks for more, so where the host is the slower one the wall's
    clock shows the host. Here the GPU first copies memory until the host is through with the call, and then does it in
    one go. A call that waits for the GPU in between is timed with what the host does meanwhile.
    """
    if device.type != "cuda":
        return seconds_of(call, device)
    finish(device)
    began = time.perf_counter()
    call()
    asking_s = time.perf_counter() - began
    x = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    out = torch.empty_like(x)
    out.copy_(x)
    copy_s = seconds_of(lambda: out.copy_(x), device)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        for _ in range(math.ceil(_AHEAD * asking_s / copy_s)):
            out.copy_(x)
        start.record()
        call()
        stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3
