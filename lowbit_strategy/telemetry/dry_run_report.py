"""The start-up report without starting anything: no processes, no memory for residuals."""

from __future__ import annotations

import torch
from torch import nn

from lowbit_strategy.collectives.gathering import FlatGathering
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.outer import OuterSync
from lowbit_strategy.engine.weights import ModuleLayout, WeightSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.outer.rule import OuterRule
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.registry import check_weights, default_weights
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, is_float
from lowbit_strategy.telemetry.startup_report import Report, build_report


def plan(
    module: nn.Module,
    compressor: Compressor,
    *,
    world_size: int,
    scatter: bool,
    device: torch.device,
    weights: WeightCoding | None = None,
    outer: OuterRule | None = None,
) -> Report:
    """What `prepare` and attaching would report for `module`.

    Args:
        module: On any device, meta included.
        compressor: Configuration.
        world_size: Of the run that is planned.
        scatter: FSDP2 instead of DDP.
        device: Where that run's gradients will be.
        weights: FSDP2: how weights travel; None: the compressor's default. They are taken to be gathered in their own
            type, in forward and in backward.
        outer: Of local steps; those that come after a synchronous part.

    Raises:
        ValueError: The compressor cannot serve a parameter of this model, there is nothing to train, or weights are to
            be coded under DDP.
    """
    specs = describe_parameters(module)
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient: nothing to synchronise")
    check_weights(weights, scatter=scatter)
    meta = torch.device("meta")
    sync = GradientSync(compressor, specs, LocalComm(world_size), meta, scatter=scatter)
    if scatter:
        coding = weights or default_weights(compressor)
        sync.weights = WeightSync(coding, _layouts(module), FlatGathering(LocalComm(world_size)), meta)
    if outer is not None:
        OuterSync(sync, {spec.name: torch.empty(spec.shape, device="meta") for spec in specs}, outer)
    return build_report(sync, device)


def _layouts(module: nn.Module) -> dict[str, ModuleLayout]:
    """All parameters of one type together, as if they were sharded as one."""
    params = {canonical_name(name): param for name, param in module.named_parameters() if is_float(param)}
    by_dtype: dict[torch.dtype, list[TensorSpec]] = {}
    for spec in describe_parameters(module, params):
        by_dtype.setdefault(params[spec.name].dtype, []).append(spec)
    return {
        str(dtype): ModuleLayout(specs=tuple(specs), dtype=dtype, num_gathers=2) for dtype, specs in by_dtype.items()
    }
