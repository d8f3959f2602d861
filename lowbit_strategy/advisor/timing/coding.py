"""How fast a device codes and copies."""

from __future__ import annotations

import torch

from lowbit_strategy.advisor.cluster import Coding
from lowbit_strategy.advisor.timing.clocks import device_seconds_of, seconds_of
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.telemetry.measure import SingleRankBucket

_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 25}
_TENSORS, _SMALL_NUMEL = 8, 1 << 13
_ENOUGH_S, _MOST_TIMES, _FEWEST_TIMES = 0.06, 144, 2
_REPEATS = 2  # of a large bucket, whose fastest counts
_MOST_QUEUED = 8  # buckets that a GPU is asked for at once: its queue holds about a thousand launches


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
