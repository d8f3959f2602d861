"""The start-up report without starting anything: no processes, no memory for residuals."""

from __future__ import annotations

import torch
from torch import nn

from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.outer import OuterSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.telemetry.startup_report import Report, build_report


def plan(
    module: nn.Module,
    compressor: Compressor,
    *,
    world_size: int,
    scatter: bool,
    device: torch.device,
    outer: OuterRule | None = None,
) -> Report:
    """What `prepare` and attaching would report for `module`.

    Args:
        module: On any device, meta included.
        compressor: Configuration.
        world_size: Of the run that is planned.
        scatter: FSDP2 instead of DDP.
        device: Where that run's gradients will be.
        outer: Of local steps; those that come after a synchronous part.

    Raises:
        ValueError: The compressor cannot serve a parameter of this model, or there is nothing to train.
    """
    specs = describe_parameters(module)
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient: nothing to synchronise")
    sync = GradientSync(compressor, specs, LocalComm(world_size), torch.device("meta"), scatter=scatter)
    if outer is not None:
        OuterSync(sync, {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}, outer)
    return build_report(sync, device)
