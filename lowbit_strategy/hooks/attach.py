"""Attaching compression to a model: what every framework's adapter calls, in this order.

1. `prepare` before the model is wrapped: validates, and all ranks compare their settings
2. wrap the model (DDP or FSDP2), then `attach_ddp` or `attach_fsdp`
3. `Attached.set_loss_scale` before backward (fp16), `Attached.end_step` after every optimizer step
4. `Attached.save`, `load`, `remove` with the framework's checkpoints; `Attached.close` at the end
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.collectives.comm import Comm, GroupComm
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks import fsdp
from lowbit_strategy.hooks.attached import Attached
from lowbit_strategy.hooks.ddp import DDPHook, refuse_python_reducer
from lowbit_strategy.hooks.digest import ParameterDigest
from lowbit_strategy.hooks.sync_options import SyncOptions
from lowbit_strategy.hooks.weights import install_weights
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.quantization.dense import Dense
from lowbit_strategy.methods.weights.registry import check_weights, default_weights
from lowbit_strategy.model.fsdp_sharding import check_process_groups
from lowbit_strategy.model.handshake import facts, handshake, plain
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, refuse_sparse_gradients
from lowbit_strategy.model.unmatched_patterns import unmatched_patterns
from lowbit_strategy.telemetry.startup_report import build_report

_log = logging.getLogger("lowbit_strategy")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that all ranks agree on."""

    compressor: Compressor
    options: SyncOptions
    specs: tuple[TensorSpec, ...]
    scatter: bool


def prepare(
    module: nn.Module,
    compressor: Compressor,
    options: SyncOptions,
    *,
    scatter: bool,
    group: dist.ProcessGroup | None = None,
) -> Prepared:
    """Check the configuration against the model, on all ranks together.

    Raises:
        ValueError: The compressor cannot serve a parameter of this model, or there is nothing to train.
        RuntimeError: The ranks differ, or a compiler setting bypasses hooks.
    """
    specs = tuple(describe_parameters(module))
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient: nothing to synchronise")
    refuse_sparse_gradients(module)
    if not scatter:
        refuse_python_reducer()
    check_weights(options.weights, scatter=scatter)
    handshake(facts(compressor, module, scatter=scatter, settings=_settings(options)), group)
    if dist.get_rank(group) == 0:
        for sentence in unmatched_patterns(compressor, module):
            _log.warning("%s", sentence)
    return Prepared(compressor, options, specs, scatter)


def _settings(options: SyncOptions) -> dict[str, object]:
    """The options as plain values."""
    plainly = {field.name: getattr(options, field.name) for field in fields(options)}
    return plainly | plain("weights", plainly["weights"])


def warn_of_one_rank() -> None:
    """Logged in all frameworks alike, once per run."""
    _log.warning("one rank: gradients are not sent to anybody, so nothing is compressed")


def attach_ddp(
    model: DistributedDataParallel, prepared: Prepared, *, device: torch.device, has_scaler: bool = False
) -> Attached:
    """Register the hook, unless there is one rank only.

    On CPU a group of its own, as patient as DDP's, keeps its collectives apart from DDP's.
    """
    group, own_group = model.process_group, None
    handshake(_circumstances(device, has_scaler), group)
    model.join_hook = _refuse_join  # type: ignore[method-assign]
    if device.type == "cpu":
        settings = getattr(group._get_backend(device), "options", None)  # not every backend has them
        timeout = getattr(settings, "_timeout", None)
        own_group = dist.new_group(dist.get_process_group_ranks(group), timeout=timeout)
    sync = _engine(prepared, GroupComm(own_group or group), device, has_scaler)
    alone = sync.comm.world_size == 1
    hook = None if alone else DDPHook(model, sync)
    compares = prepared.options.check_digest and not alone
    digest = ParameterDigest(_replicated(model), sync.comm, device) if compares else None
    attached = Attached(
        sync, model.module, prepared.options, group=group, hook=hook, own_group=own_group, digest=digest
    )
    attached.close_with(model)
    _report(sync)
    return attached


def _replicated(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """What DDP keeps the same on all ranks: all parameters that it does not ignore."""
    ignored = model.parameters_to_ignore
    return {canonical_name(name): param for name, param in model.module.named_parameters() if name not in ignored}


def attach_fsdp(
    module: nn.Module,
    prepared: Prepared,
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    has_scaler: bool = False,
) -> Attached:
    """Give every FSDP2 module under `module` its compressed reduce-scatter.

    Raises:
        ValueError: `module` has no FSDP2 module, or is sharded in a way that cannot be compressed.
    """
    handshake(_circumstances(device, has_scaler), group)
    sync = _engine(prepared, GroupComm(group), device, has_scaler)
    check_process_groups(module, group)
    if fsdp.install(module, sync) == 0:
        raise ValueError("no module is sharded with fully_shard: nothing to compress")
    coding = prepared.options.weights or default_weights(prepared.compressor)
    sync.weights = install_weights(module, coding, device=sync.device, group=group)
    sync.extra_state["weights"] = sync.weights
    _report(sync)
    return Attached(sync, module, prepared.options, group=group)


def _circumstances(device: torch.device, has_scaler: bool) -> dict[str, object]:
    """What must be the same on all ranks and is known only when the model has been wrapped."""
    return {"gradient scaler": "one" if has_scaler else "none", "type of device": device.type}


def _refuse_join(**options: Any) -> Any:
    raise RuntimeError(
        "torch.distributed.algorithms.Join does not work with compressed gradients: a rank that has no more batches"
        " misses exchanges between the others. Give every rank the same number of batches (DistributedSampler does)"
    )


def _engine(prepared: Prepared, comm: Comm, device: torch.device, has_scaler: bool) -> GradientSync:
    options = prepared.options
    alone = comm.world_size == 1
    sync = GradientSync(
        Dense() if alone else prepared.compressor,  # one rank keeps no residuals, save what a checkpoint brings along
        prepared.specs,
        comm,
        _with_index(device),
        scatter=prepared.scatter,
        seed=options.seed,
        rollback=has_scaler if options.rollback is None else options.rollback,
    )
    if alone:
        warn_of_one_rank()
    return sync


def _report(sync: GradientSync) -> None:
    """Called when everything is attached: only then the memory for messages is known."""
    if sync.comm.rank == 0 and sync.comm.world_size > 1:
        _log.info("%s", build_report(sync).render())


def _with_index(device: torch.device) -> torch.device:
    """Futures and streams need the index of the device that "cuda" stands for."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
