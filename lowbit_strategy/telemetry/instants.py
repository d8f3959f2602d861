"""Points in time, by this thread's clock on CPU and by the device's clock on CUDA."""

from __future__ import annotations

import time

import torch

Instant = float | torch.cuda.Event


def now(device: torch.device) -> Instant:
    """This thread's time on CPU; on CUDA the current stream's, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(began: Instant, ended: Instant) -> float:
    """Seconds between two instants. On CUDA it waits until the device has reached `ended`."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert isinstance(ended, torch.cuda.Event)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
