"""Bytes of one all-reduce or reduce-scatter by each compressor: what its communicator counts, what the kernel counts.

Started by torchrun on every host. A variant is ``OPERATION/NAME``, as in `collective`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.hooks.bucket import BucketLayout, Entry
from lowbit_strategy.hooks.engine import GradientSync
from lowbit_strategy.reducers.registry import preset
from lowbit_strategy.reducers.tensors import TensorSpec
from slow_links.counters import sent_nbytes, sent_packets

WARMUP_STEPS = 2  # not counted
LATE = 1 << 20  # steps after which every warm-up is over
ROWS = 256  # of the matrix, a rank


def measure(variant: str, numel: int, steps: int) -> dict[str, float]:
    """A step's bytes and packets of this rank."""
    operation, name = variant.split("/")
    scatter = operation == "reduce-scatter"
    world_size = dist.get_world_size()
    rows = ROWS * world_size
    spec = TensorSpec("gradient", (rows, numel // rows))
    row_numel = spec.numel // world_size
    comm = Comm(dist.group.WORLD)
    sync = GradientSync(preset(name), [spec], comm, torch.device("cpu"), scatter=scatter)
    sync.step_index = LATE
    sync.follow_phase()
    layout = BucketLayout((Entry(spec.name, 0),), row_numel=row_numel if scatter else None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    out = torch.empty(row_numel if scatter else row_numel * world_size)
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            dist.barrier()
            before = comm.sent_nbytes, sent_nbytes(), sent_packets()
        x = torch.randn(row_numel * world_size, generator=generator)
        for pending in sync.reduce(layout, x, out):
            if pending is not None:
                pending.wait()
        sync.end_step()
    accounted = comm.sent_nbytes - before[0]
    dist.barrier()  # nothing is on its way any more
    sent, packets = sent_nbytes() - before[1], sent_packets() - before[2]
    return {"accounted_nbytes": accounted / steps, "sent_nbytes": sent / steps, "packets": packets / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variants", nargs="+", required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    report = {variant: measure(variant, options.numel, options.steps) for variant in options.variants}
    options.report.write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
