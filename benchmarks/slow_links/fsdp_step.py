"""A plain Lightning script that trains the GPT under FSDP2 in one way after the other and reports step times and bytes.

Started by torchrun on every host. All ways shard the same modules: every block, then the rest. ``fsdp2`` is FSDP2 as
Lightning ships it, in float32; ``fsdp2-bf16`` the same with weights gathered and gradients reduced in bfloat16;
``loco_fsdp`` its default; ``loco_fsdp:NAME`` with weights sent as NAME (exact, code8, delta4).
"""

from __future__ import annotations

import os

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.slow_links.ddp_step import NO_SYNC, StepMeter, after_choice
from benchmarks.slow_links.measuring import Measurement, fit, measure_in_turn, parse_options
from lowbit_strategy import Auto, preset
from lowbit_strategy.lightning import LowBitFSDPStrategy
from recipes.gpt import LanguageModel

STOCK, STOCK_BF16 = "fsdp2", "fsdp2-bf16"


class ShardedModel(LanguageModel):
    """Sharded as Lightning's documentation shows: every block, then the rest."""

    dtype_of_weights: torch.dtype | None = None

    def configure_model(self) -> None:
        if isinstance(self.gpt, FSDPModule):
            return
        mesh, dtype = self.device_mesh["data_parallel"], self.dtype_of_weights
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(dtype, dtype))
        whole = MixedPrecisionPolicy(dtype, dtype, output_dtype=torch.float32)
        fully_shard(self.gpt, mesh=mesh, mp_policy=whole)


class HalfModel(ShardedModel):
    """Weights and gradients travel in bfloat16, which the forward runs in too."""

    dtype_of_weights = torch.bfloat16


def strategy_of(variant: str, world_size: int) -> L.pytorch.strategies.Strategy:
    if variant in (STOCK, STOCK_BF16):
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    if variant.startswith("lowbit_"):
        return LowBitFSDPStrategy(Auto())
    name, _, weights = variant.partition(":")
    return LowBitFSDPStrategy(preset(name.removesuffix("_fsdp")), weights=weights or None)


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])

    def measure(variant: str) -> Measurement:
        L.seed_everything(0, verbose=False)
        kind = {NO_SYNC: LanguageModel, STOCK_BF16: HalfModel}.get(variant, ShardedModel)
        model = kind(options.width, options.depth, heads=4, context=options.context)
        own = after_choice(options, variant)
        meter = StepMeter(own)
        numel = sum(parameter.numel() for parameter in model.parameters())
        if variant == NO_SYNC:  # each rank by itself, at the same time as the others
            fit(model, meter, own, strategy=SingleDeviceStrategy(device="cpu"), devices=1, num_nodes=1)
        else:
            fit(model, meter, own, strategy=strategy_of(variant, world_size))
        return Measurement(meter.times_s, [meter.sent_per_step_nbytes], numel)

    measure(
        next(each for each in options.variants if each != NO_SYNC)
    )  # makes the process group, as the first Trainer of a user's script does
    measure_in_turn(measure, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
