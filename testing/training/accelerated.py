"""A small language model under Accelerate, for the tests that train with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lowbit_strategy.accelerate import LowBitAccelerator, LowBitPlugin, binding_of
from recipes.gpt import GPT
from recipes.text import Windows, standard_library
from testing.training.comparing import fingerprint

Kind = Literal["ddp", "fsdp"]
CONTEXT, BATCH = 32, 8


def fresh_state() -> None:
    """Accelerate keeps what it is in singletons and in the environment: as in a new process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for name in ("ACCELERATE_USE_FSDP", "FSDP_VERSION", "ACCELERATE_MIXED_PRECISION"):
        os.environ.pop(name, None)


def fsdp_plugin(*classes: str, by_block: bool = True) -> FullyShardedDataParallelPlugin:
    """Modules of these classes one by one, of none the blocks of `GPT`; or any model as a whole."""
    names = list(classes or ("Block",))
    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": names}
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=False, **(wrap if by_block else {"auto_wrap_policy": "no_wrap"})
    )


def make(kind: Kind, plugin: LowBitPlugin | None, *, accumulate: int = 1, **options: Any) -> Accelerator:
    """Compressed with `plugin`; without, Accelerate's own (which knows no FSDP on CPU)."""
    fresh_state()
    options["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=accumulate)
    if plugin is None:
        return Accelerator(**options)
    if kind == "fsdp":
        options.setdefault("fsdp_plugin", fsdp_plugin())
    return LowBitAccelerator(lowbit_plugin=plugin, **options)


@dataclass
class Job:
    """A model, its optimizer and data, prepared."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    batches: Any
    losses: list[float]

    @property
    def sync(self) -> Any:
        binding = binding_of(self.accelerator)
        assert binding is not None
        return binding.sync


def prepared(accelerator: Accelerator, *, lr: float = 1e-3, num_samples: int = 320) -> Job:
    set_seed(0)
    model = GPT(width=32, depth=2, heads=2, context=CONTEXT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = DataLoader(Windows(standard_library("train"), CONTEXT, limit=num_samples), batch_size=BATCH)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    return Job(accelerator, model, optimizer, batches, [])


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens_BT, next_BT = batch
    logits = model(tokens_BT).float()  # under FSDP2 bfloat16, whose steps at 4.7 are 0.7 %
    return F.cross_entropy(logits.flatten(0, 1), next_BT.flatten())


def train(job: Job, num_batches: int, *, skip: int = 0, clip: float | None = None) -> None:
    """Batches `skip` to `num_batches`, in the loop that Accelerate's documentation shows."""
    accelerator = job.accelerator
    batches: Iterator[Any] = iter(skip_first_batches(job.batches, skip) if skip else job.batches)
    for _ in range(skip, num_batches):
        batch = next(batches)
        with accelerator.accumulate(job.model):
            loss = loss_of(job.model, batch)
            accelerator.backward(loss)
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(job.model.parameters(), clip)
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.losses.append(loss.item())


@torch.no_grad()
def validation_loss(model: nn.Module) -> float:
    windows = DataLoader(Windows(standard_library("validation"), CONTEXT, limit=64), batch_size=64)
    return loss_of(model, next(iter(windows))).item()


def record_of(model: nn.Module) -> str:
    """PyTorch's own record of what synchronizes gradients."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model._get_ddp_logging_data().get("comm_hook", "")
    groups = [child._get_fsdp_state()._fsdp_param_group for child in model.modules() if isinstance(child, FSDPModule)]
    (record,) = {type(group._reduce_scatter_comm).__name__ for group in groups if group is not None}
    return record


def facts_of(job: Job) -> dict[str, Any]:
    """What the assertions are about."""
    model = job.model
    facts = {"loss": validation_loss(model), "losses": job.losses, "bits": fingerprint(model)}
    facts["record"] = record_of(model)
    if binding_of(job.accelerator) is not None:
        sync = job.sync
        facts |= {"steps": sync.step_index, "sent": sync.ranks.peers.sent_nbytes}
        facts["account"] = sum(sync.state.sent_nbytes(name) for name in sync.specs)
    return facts


def state_folder(folder: Path) -> str:
    return str(folder / "state")
