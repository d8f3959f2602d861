"""Measures how fast this device codes and how fast ranks reach each other, with the code that training uses."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from lowbit_strategy.adaptation.rehearsal import SingleRankBucket
from lowbit_strategy.advisor.cluster import ANY_RATE, Bench, Cluster, Coding, Link, slowest_cluster
from lowbit_strategy.collectives.comm import Comm, GroupComm, gathered
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.ranks.ranks import Ranks, make_ranks
from lowbit_strategy.ranks.topology import find_topology
from lowbit_strategy.version import __version__

_AHEAD = 2.0  # times as long as the host needs to ask for what is timed, a GPU is kept busy
_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 25}
_TENSORS, _SMALL_NUMEL = 8, 1 << 13
_ENOUGH_S, _MOST_TIMES, _FEWEST_TIMES = 0.06, 144, 2
_REPEATS = 2  # repeats of a large bucket; the fastest counts
_MOST_QUEUED = 8  # buckets that a GPU is asked for at once: its queue holds about a thousand launches

_SMALL_NBYTES = 64
_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # bytes to each other rank
_RING_SIZES = tuple(4 * nbytes for nbytes in _SIZES)  # bytes around a ring, up to most of a DDP bucket
_LONG_S, _LONG_FAR_S = 0.25, 1.0  # a message that takes so long tells the bandwidth well enough
_WARM = 0.8  # a connection that was idle begins slowly: calls are repeated until one takes at least so much of the last
_MOST_WARMING = 8
_LINK_S, _MOST_CALLS, _FEWEST_CALLS, _FEWEST_FAR = 0.35, 12, 3, 6  # per measurement


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The time of a call, until the device has finished."""
    _finish(device)
    began = time.perf_counter()
    call()
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The device's time for a call.

    A GPU does what the host has asked for while the host asks for more, so where the host is the slower one the wall's
    clock shows the host. Here the GPU first copies memory until the host is through with the call, and then does it in
    one go. A call that waits for the GPU in between is timed with what the host does meanwhile.
    """
    if device.type != "cuda":
        return seconds_of(call, device)
    _finish(device)
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
        own = torch.Generator(device).manual_seed(0)  # the script's random numbers are unchanged
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


def measure(presets: Iterable[str], device: torch.device, done: Callable[[], None] = lambda: None) -> Bench:
    """Codecs, then the links between all ranks of the default group, if there is one; the same on all ranks.

    Args:
        presets: Names of those whose codecs are measured.
        device: What ranks compute on.
        done: Called after each preset.
    """
    codings = {}
    for name in presets:
        codings[name] = measure_coding(PRESETS[name], device)
        done()
    alone = Link(0.0, ANY_RATE)
    cluster = Cluster(inter_node=alone, intra_node=alone, gloo=device.type == "cpu", codings=codings)
    if not torch.distributed.is_initialized():
        return Bench(version=__version__, cluster=cluster)
    topology = find_topology()
    size = topology.ranks_per_node if topology.obstacle is None else None
    ranks = make_ranks(None, replace(topology, node_size=size, far=None), device)
    between, inside = measure_links(ranks, device)
    ranks.destroy()
    cluster = slowest_cluster(gathered(replace(cluster, inter_node=between, intra_node=inside)))
    per_node = topology.ranks_per_node or 1
    return Bench(version=__version__, nodes=topology.world_size // per_node, ranks_per_node=per_node, cluster=cluster)


def measure_links(ranks: Ranks, device: torch.device) -> tuple[Link, Link]:
    """Measure the link of a node and that of a rank inside it. A collective of all ranks."""
    per_node = ranks.topology.ranks_per_node or 1
    between = measure_link(ranks, ranks.peers, device)
    inside = between if ranks.intra_node is None else measure_link(ranks, ranks.intra_node, device)
    around = measure_ring(ranks, ranks.everyone, device, max(1, -(-ranks.world_size // per_node) - 1))
    near = around if ranks.intra_node is None else measure_ring(ranks, ranks.intra_node, device, 1)
    return replace(between.shared_by(per_node), ring=around), replace(inside, ring=near)


def measure_link(ranks: Ranks, comm: Comm, device: torch.device) -> Link:
    """Measure one rank's link, by all-to-alls among the ranks of `comm`."""

    def exchange(nbytes: int) -> Callable[[], object]:
        x = torch.zeros((comm.world_size, nbytes), dtype=torch.uint8, device=device)
        out = torch.empty_like(x)
        return lambda: comm.all_to_all(out, x).wait()

    sizes = [(nbytes, (comm.world_size - 1) * nbytes) for nbytes in _SIZES]
    return _measure(ranks, comm, device, exchange, sizes, 1)


def measure_ring(ranks: Ranks, comm: Comm, device: torch.device, in_series: int) -> Link:
    """Measure one rank's link, by the backend's all-reduces, each of two hops of `in_series` messages."""
    own, size = GroupComm(comm.group), comm.world_size

    def reduce(nbytes: int) -> Callable[[], object]:
        x = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)
        return lambda: own.all_reduce(x).wait()

    sizes = [(nbytes, 2 * (size - 1) * nbytes // size) for nbytes in _RING_SIZES]
    return _measure(ranks, own, device, reduce, sizes, 2 * in_series)


def _measure(
    ranks: Ranks,
    comm: Comm,
    device: torch.device,
    collective: Callable[[int], Callable[[], object]],
    sizes: Sequence[tuple[int, int]],
    in_series: int,
) -> Link:
    """`sizes`: of what is exchanged, and the bytes that a rank then sends."""
    latency, latency_spread = calls_of(ranks, comm, collective(_SMALL_NBYTES), device)
    beyond = rate_spread = 0.0
    measured: list[tuple[float, float]] = []
    for nbytes, sent_nbytes in sizes:
        seconds, spread = calls_of(ranks, comm, collective(nbytes), device, pause_s=2 * latency)
        beyond = max(beyond, seconds - latency)
        rate_spread = min(1.0, spread * seconds / max(beyond, 1e-9))
        measured.append((sent_nbytes / in_series, beyond / in_series))
        if _highest(ranks.everyone, beyond, device) > (_LONG_FAR_S if comm.is_far else _LONG_S):
            break  # at the same size on all ranks
    return Link(
        latency / in_series,
        rate_of(measured),
        tuple(measured),
        latency_spread=latency_spread,
        rate_spread=rate_spread,
    )


def calls_of(
    ranks: Ranks, comm: Comm, call: Callable[[], object], device: torch.device, pause_s: float = float("inf")
) -> tuple[float, float]:
    """Seconds of a collective, the median of a few calls, and by which part they differ.

    1. The call is repeated until it takes no less than before, equally often on all ranks.
    2. Ranks of a node begin together, as they do in a step: one after the other, each would have their link to itself.
    3. Of each call the mean over ranks counts: the first rank waits for the last, and each is last now and then.

    Args:
        ranks: All of them.
        comm: Those that call.
        call: The collective.
        device: Device of its tensors.
        pause_s: The longest pause before a call. Ranks that are far apart report ahead that their next receive is
            posted. In training these reports arrive long before a message is sent; here they are given the time. Of
            these the fastest call counts: their connections become faster for a while, and training uses them longer.
    """
    each = 0.0
    for _ in range(1 + _MOST_WARMING):
        before, each = each, _highest(ranks.everyone, seconds_of(call, device), device)
        if each > _WARM * before > 0:
            break
    pause = min(each, pause_s) if comm.is_far else 0.0
    fewest = _FEWEST_FAR if comm.is_far else _FEWEST_CALLS
    times = max(fewest, min(_MOST_CALLS, int(_LINK_S / each)))
    seconds = []
    for _ in range(times):
        time.sleep(pause)
        if ranks.intra_node is not None:
            _highest(ranks.intra_node, 0.0, device)
        seconds.append(seconds_of(call, device))
    mean = torch.tensor(seconds, dtype=torch.float64, device=device) / comm.world_size
    comm.all_reduce(mean).wait()
    ordered, quarter = sorted(mean.tolist()), times // 4
    usual, differ = statistics.median(ordered), (ordered[-1 - quarter] - ordered[quarter]) / 2
    if comm.is_far:
        usual, differ = ordered[0], ordered[1] - ordered[0]
    return usual, differ / usual


def _highest(comm: Comm, value: float, device: torch.device) -> float:
    """Highest value of all ranks."""
    x = torch.tensor([value], dtype=torch.float64, device=device)
    comm.all_reduce_max(x).wait()
    return float(x)


def rate_of(measured: Sequence[tuple[float, float]]) -> float:
    """The rate from the longest transfer and the next shorter one: what passes at once does not count."""
    (nbytes, seconds), (longer, longest) = [(0.0, 0.0), *measured][-2:]
    if longest <= 1.1 * seconds:  # too little to tell
        return min(ANY_RATE, longer / max(longest, 1e-9))
    return min(ANY_RATE, (longer - nbytes) / (longest - seconds))
