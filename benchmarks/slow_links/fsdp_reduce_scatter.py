"""A plain Lightning script under FSDP2 that reports what the gradient reduce-scatters of a step cost: seconds, bytes.

Started by torchrun on every host. The baseline is FSDP2 as Lightning ships it, with gloo's reduce-scatter in float32.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

import lowbit_strategy  # noqa: F401  registers the strategies' names
from benchmarks.slow_links.measuring import Measurement, fit, measure_in_turn, parse_options, strategy_of
from recipes.gpt import LanguageModel
from testing.counting.interface import sent_nbytes

STOCK = "fsdp2"


class StockModel(LanguageModel):
    """Sharded as Lightning's documentation shows: every block, then the rest."""

    def configure_model(self) -> None:
        if isinstance(self.gpt, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)


class MeteredReduceScatter:
    """Stands before a module's reduce-scatter and measures it.

    The barriers keep the other ranks' lateness out of the time, bytes still on their way out of the count, and bytes of
    ranks that are ahead in it.

    Args:
        inner: What reduces.
        barrier_nbytes: What one barrier sends itself.
    """

    def __init__(self, inner: Any, barrier_nbytes: float) -> None:
        self.inner = inner
        self.barrier_nbytes = barrier_nbytes
        self.seconds = 0.0
        self.nbytes = 0.0
        self.numel = 0

    def allocate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.inner.allocate(*arguments, **options)
        return tensor

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        dist.barrier()
        before = sent_nbytes()
        dist.barrier()
        start = time.perf_counter()
        result = self.inner(output_tensor, input_tensor, *arguments, **options)
        self.seconds += time.perf_counter() - start
        dist.barrier()
        self.nbytes += sent_nbytes() - before - 2 * self.barrier_nbytes
        self.numel += input_tensor.numel()
        return result


def nbytes_of_barrier(repeats: int = 50) -> float:
    """What a barrier of all ranks sends over this host's interface."""
    dist.barrier()
    before = sent_nbytes()
    for _ in range(repeats):
        dist.barrier()
    return (sent_nbytes() - before) / repeats


class ReduceScatterMeter(L.Callback):
    """Sums over a step's reduce-scatters, for the steps after the warm-up."""

    def __init__(self, warmup_steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.comms: list[MeteredReduceScatter] = []
        self.times_s: list[float] = []
        self.sent_nbytes: list[float] = []
        self.numel = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        barrier_nbytes = nbytes_of_barrier()
        for module in pl_module.modules():
            if isinstance(module, FSDPModule) and (group := module._get_fsdp_state()._fsdp_param_group) is not None:
                self.comms.append(MeteredReduceScatter(group._reduce_scatter_comm, barrier_nbytes))
                module.set_custom_reduce_scatter(self.comms[-1])

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step > self.warmup_steps:
            self.times_s.append(sum(comm.seconds for comm in self.comms))
            self.sent_nbytes.append(sum(comm.nbytes for comm in self.comms))
            self.numel = sum(comm.numel for comm in self.comms)
        for comm in self.comms:
            comm.seconds, comm.nbytes, comm.numel = 0.0, 0.0, 0


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])

    def measure(variant: str) -> Measurement:
        L.seed_everything(0, verbose=False)
        stock = variant == STOCK
        kind = StockModel if stock else LanguageModel
        model = kind(options.width, options.depth, heads=4, context=options.context)
        strategy = (
            ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
            if stock
            else strategy_of(variant)
        )
        meter = ReduceScatterMeter(options.warmup_steps)
        fit(model, meter, options, strategy=strategy)
        return Measurement(meter.times_s, meter.sent_nbytes, meter.numel)

    measure_in_turn(measure, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
