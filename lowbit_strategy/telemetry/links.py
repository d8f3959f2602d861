"""How fast ranks reach each other, and how fast they code, measured with what training uses."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lowbit_strategy.collectives.comm import Comm, wait_for_all
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.plan.cost import ANY_RATE, Cluster, Link
from lowbit_strategy.ranks.ranks import Ranks

_SMALL_NBYTES = 64
_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # of what goes to each other rank
_LONG_S = 0.1  # a message that takes so long tells the bandwidth well enough
_CODED_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 25}


def measure_links(ranks: Ranks, device: torch.device, compressor: Compressor) -> Cluster:
    """Links and coding speed, as this rank finds them while all others measure too; on all ranks, between steps.

    Args:
        ranks: Who trains.
        device: Of gradients.
        compressor: Whose coding is timed.
    """
    between, inside = measure_levels(ranks, device)
    coded = coded_per_s(compressor, device)
    return Cluster(inter_node=between, intra_node=inside, encoded_per_s=coded, trees=device.type == "cuda")


def measure_levels(ranks: Ranks, device: torch.device) -> tuple[Link, Link]:
    """A node's link to the other nodes, and a rank's to the others of its node; one and the same with one level."""
    between = measure_link(ranks.peers, device)
    inside = between if ranks.intra_node is None else measure_link(ranks.intra_node, device)
    per_node = 1 if ranks.topology is None else ranks.topology.ranks_per_node or 1
    return Link(between.latency_s, min(ANY_RATE, between.nbytes_per_s * per_node)), inside


def measure_link(comm: Comm, device: torch.device) -> Link:
    """Of one rank, by all-to-alls among the ranks of `comm`, two of each size, the faster of which counts."""
    if comm.world_size == 1:
        return Link(0.0, ANY_RATE)
    counted = comm.sent_nbytes  # this is not traffic of a step
    latency = _exchange_s(comm, _SMALL_NBYTES, device)
    rate = ANY_RATE
    for nbytes in _SIZES:
        seconds = _exchange_s(comm, nbytes, device)
        rate = (comm.world_size - 1) * nbytes / max(seconds - latency, 1e-9)
        slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
        comm.all_reduce_max(slowest).wait()  # all ranks stop at the same size
        if float(slowest) > _LONG_S:
            break
    comm.sent_nbytes = counted
    return Link(latency, min(rate, ANY_RATE))


def _exchange_s(comm: Comm, nbytes: int, device: torch.device) -> float:
    x = torch.zeros((comm.world_size, nbytes), dtype=torch.uint8, device=device)
    out = torch.empty_like(x)
    return min(seconds_of(lambda: comm.all_to_all(out, x).wait(), device) for _ in range(2))


def coded_per_s(compressor: Compressor, device: torch.device) -> float:
    """Elements of one hop, encoded and decoded, per second."""
    numel = _CODED_NUMEL.get(device.type, 1 << 20)
    spec = TensorSpec("measured", (numel // 1024, 1024))
    sync = GradientSync(compressor.phase(1 << 20), [spec], Ranks.flat(LocalComm()), device, scatter=True)
    x = torch.randn(numel, device=device)
    out, layout = torch.empty_like(x), BucketLayout((Entry(spec.name, 0),), row_numel=numel)

    def once() -> None:
        sync.begin_step()
        wait_for_all(sync.reduce(layout, x, out))
        sync.end_step()

    once()  # kernels are compiled
    return numel / min(seconds_of(once, device) for _ in range(2))


def memcpy_nbytes_per_s(device: torch.device) -> float:
    """Bytes read and written per second by copying a tensor that no cache holds."""
    x = torch.ones(1 << (24 if device.type == "cpu" else 28), dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    return 2 * x.nbytes / min(seconds_of(lambda: out.copy_(x), device) for _ in range(3))


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes until the device has done what it asks for."""
    finish(device)
    began = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - began


def finish(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
