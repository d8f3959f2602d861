"""How long a device takes for what it is asked to do, and how long optimizers take: the part of a step that begins when
nothing travels any more.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_clocks: weakref.WeakSet[OptimizerClock] = weakref.WeakSet()  # that run
_handles: list[Any] = []  # torch's hooks, once per process
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


class OptimizerClock:
    """Times the steps of all optimizers of ``torch.optim`` in this process as long as it lives.

    A step that is given a closure, as Lightning gives it forward and backward, counts from where that has returned.
    The device finishes its work before a step and after it. Steps that are compiled are not timed.

    Args:
        device: Of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._seconds = 0.0
        if not _handles:
            _handles.append(register_optimizer_step_pre_hook(_before))
            _handles.append(register_optimizer_step_post_hook(_after))
        _clocks.add(self)

    def take(self) -> float:
        """Seconds since the last call, or the beginning."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def begin(self) -> None:
        finish(self._device)
        self._began = time.perf_counter()

    def end(self) -> None:
        finish(self._device)
        self._seconds += time.perf_counter() - self._began


def _before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Begin, and once more when a closure has returned; `args` begin with the optimizer."""
    if torch.compiler.is_compiling():
        return None
    running = list(_clocks)
    for clock in running:
        clock.begin()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not running or not callable(closure):
        return None

    def timed(*values: Any) -> Any:
        loss = closure(*values)
        for clock in running:
            clock.begin()
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": timed}
    return (args[0], timed, *args[2:]), kwargs  # its name may be another


def _after(*_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for clock in list(_clocks):
        clock.end()
