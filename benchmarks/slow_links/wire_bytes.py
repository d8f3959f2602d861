"""Bytes of one all-reduce or reduce-scatter by each compressor: what its communicator counts, what the kernel counts.

Started by torchrun on every host. A variant is ``OPERATION/NAME``, as in `collective`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import GroupComm, wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.ranks.ranks import Ranks
from testing.counting import interface as counters

WARMUP_STEPS = 2  # not counted
LATE = 1 << 20  # steps after which every warm-up is over
ROWS = 256  # of the matrix, a rank


def measure(variant: str, numel: int, steps: int) -> dict[str, float]:
    """A step's bytes, packets and segments sent again, of this rank."""
    operation, name = variant.split("/")
    scatter = operation == "reduce-scatter"
    world_size = dist.get_world_size()
    rows = ROWS * world_size
    spec = TensorSpec("gradient", (rows, numel // rows))
    row_numel = spec.numel // world_size
    comm = GroupComm(dist.group.WORLD)
    sync = GradientSync(preset(name), [spec], Ranks.flat(comm), torch.device("cpu"), sharded=scatter)
    sync.step_index = LATE
    sync.follow_phase()
    layout = BucketLayout(((spec.name, 0),), row_numel=row_numel if scatter else None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    out = torch.empty(row_numel if scatter else row_numel * world_size)
    for step in range(WARMUP_STEPS + steps):
        if step == WARMUP_STEPS:
            dist.barrier()
            before, read_before = comm.sent_nbytes, counters.read()
        x = torch.randn(row_numel * world_size, generator=generator)
        sync.begin_step()
        wait_for_all(sync.reduce(layout, x, out))
        sync.end_step()
    accounted = comm.sent_nbytes - before
    dist.barrier()  # nothing is on its way any more
    counted = asdict(counters.read() - read_before)
    return {"accounted_nbytes": accounted / steps} | {name: count / steps for name, count in counted.items()}


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
