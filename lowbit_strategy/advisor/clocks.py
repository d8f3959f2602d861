"""How long a device takes for what it is asked to do, how fast it codes and copies, and how long optimizers take: the
part of a step that begins when all communication has ended.
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

from lowbit_strategy.advisor.cluster import Coding
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.telemetry.measure import SingleRankBucket

_clocks: weakref.WeakSet[OptimizerClock] = weakref.WeakSet()  # that run
_handles: list[Any] = []  # torch's hooks, once per process
_AHEAD = 2.0  # times as long as the host needs to ask for what is timed, a GPU is kept busy
_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 25}
_TENSORS, _SMALL_NUMEL = 8, 1 << 13
_ENOUGH_S, _MOST_TIMES, _FEWEST_TIMES = 0.06, 144, 2
_REPEATS = 2  # of a large bucket, whose fastest counts
_MOST_QUEUED = 8  # buckets that a GPU is asked for at once: its queue holds about a thousand launches


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
    """Begin, and again when a closure has returned; `args` begin with the optimizer."""
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


def measure_coding(compressor: Compressor, device: torch.device) -> Coding:
    """One hop, encoded and decoded: of several tensors as one bucket, small ones and large ones.

    On a GPU a small bucket takes as long as the host needs to ask for it; a large one is timed on the GPU alone.
    Where a small bucket took more than half as long as a large one, something may have disturbed it, as another process
    on the same GPU does, and all of the large one's time counts for its elements: too slow rather than too fast.
    """
    numel = _NUMEL.get(device.type, 1 << 20)
    small, large = _Bucket(compressor, min(_SMALL_NUMEL, numel // 2), device), _Bucket(compressor, numel, device)
    small_s, found = small.device_s(), sorted(large.device_s() for _ in range(_REPEATS))
    return Coding(numel_per_s(small.numel, small_s, large.numel, found[0]), small.wall_s(), found[-1] / found[0] - 1)


def numel_per_s(small_numel: int, small_s: float, large_numel: int, large_s: float) -> float:
    """Elements per second of a large bucket, beyond what a small one takes."""
    if 2 * small_s > large_s:
        return large_numel / large_s
    return (large_numel - small_numel) / (large_s - small_s)


class _Bucket:
    """So many elements in several tensors, coded over and over."""

    def __init__(self, compressor: Compressor, numel: int, device: torch.device) -> None:
        each = numel // _TENSORS
        specs = [TensorSpec(f"measured {at}", (max(1, each // 128), min(each, 128))) for at in range(_TENSORS)]
        self._device = device
        self._alone = SingleRankBucket(compressor.phase(1 << 20), specs, device)
        own = torch.Generator(device).manual_seed(0)  # the script's random numbers stay as they are
        self._x = torch.randn(self._alone.numel, device=device, generator=own)
        self._out = torch.empty_like(self._x)
        self._reduce(1)  # kernels are compiled

    @property
    def numel(self) -> int:
        return self._x.numel()

    def _reduce(self, times: int) -> None:
        for _ in range(times):
            self._alone.reduce(self._x, self._out)

    def _times(self, most: int) -> int:
        once = seconds_of(lambda: self._reduce(1), self._device)
        return int(min(most, max(_FEWEST_TIMES, _ENOUGH_S / once)))

    def wall_s(self) -> float:
        times = self._times(_MOST_TIMES)
        return seconds_of(lambda: self._reduce(times), self._device) / times

    def device_s(self) -> float:
        if self._device.type != "cuda":
            return self.wall_s()
        times = self._times(_MOST_QUEUED)
        return device_seconds_of(lambda: self._reduce(times), self._device) / times


def memcpy_nbytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by copying a tensor that no cache holds."""
    x = torch.ones(1 << (24 if device.type == "cpu" else 26), dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    return 2 * x.nbytes / min(seconds_of(lambda: out.copy_(x), device) for _ in range(3))
