"""One all-reduce or reduce-scatter of N elements, by gloo in float32 and by each compressor: seconds and bytes.

Started by torchrun on every host. A variant is ``OPERATION/NAME``: ``all-reduce/fp32``, ``reduce-scatter/loco``. There
is one tensor of N elements, so nothing is exempt or at high precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.slow_links.measuring import Measurement, measure_in_turn, parse_options
from lowbit_strategy.collectives.comm import GroupComm, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.ranks.ranks import Ranks
from testing.counting.interface import sent_nbytes


def fp32(x: Tensor, out: Tensor, *, scatter: bool) -> Callable[[], None]:
    def run() -> None:
        if scatter:
            dist.reduce_scatter_single(out, x)
        else:
            dist.all_reduce(x)
            x.div_(dist.get_world_size())  # a mean, as the compressors give

    return run


def compressed(name: str, x: Tensor, out: Tensor, *, scatter: bool) -> Callable[[], None]:
    world_size = dist.get_world_size()
    row_numel = x.numel() // world_size
    spec = TensorSpec("gradient", (world_size, row_numel))
    sync = GradientSync(
        preset(name), [spec], Ranks.flat(GroupComm(dist.group.WORLD)), torch.device("cpu"), sharded=scatter
    )
    layout = BucketLayout(((spec.name, 0),), row_numel=row_numel if scatter else None)

    def run() -> None:
        sync.begin_step()
        wait_for_all(sync.reduce(layout, x, out if scatter else x))
        sync.end_step()

    return run


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    numel = options.numel - options.numel % dist.get_world_size()

    def measure(variant: str) -> Measurement:
        operation, name = variant.split("/")
        scatter = operation == "reduce-scatter"
        x = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        out = torch.empty(numel // dist.get_world_size())
        run = fp32(x, out, scatter=scatter) if name == "fp32" else compressed(name, x, out, scatter=scatter)
        times = []
        for index in range(options.warmup_steps + options.steps):
            dist.barrier()
            if index == options.warmup_steps:
                before = sent_nbytes()
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        dist.barrier()  # nothing is on its way any more
        return Measurement(times[options.warmup_steps :], [(sent_nbytes() - before) / options.steps], numel)

    measure_in_turn(measure, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
