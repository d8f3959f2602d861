"""Attaches compression to a model in DDP, or to a replica that joins and leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.assembly import compare_with_all, make_engine, make_session
from lowbit_strategy.attach.optimizer_hook import attachment_begins
from lowbit_strategy.attach.prepare import PreparedModel, on_ranks
from lowbit_strategy.attach.session import Session
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.hooks.ddp import DDPHook, hooked
from lowbit_strategy.inform import inform
from lowbit_strategy.model.parallel_dims import model_group
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, device_of
from lowbit_strategy.ranks.ranks import Ranks, make_ranks
from lowbit_strategy.ranks.topology import find_topology


def attach_ddp(
    model: DistributedDataParallel,
    prepared: PreparedModel,
    *,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
    has_scaler: bool = False,
) -> Session:
    """Register the hook, unless there is only one rank. The ranks of DDP's process group average gradients.

    On CPU, and if ranks meet in rounds, the collectives get their own process group with DDP's timeout.

    Args:
        model: The prepared module wrapped in ``DistributedDataParallel``.
        prepared: What `prepare` returned.
        device: Device of the gradients; None: that of the parameters.
        mesh: The mesh of all ranks that hold part of the model, needed only if its parameters do not show it.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: `model` was not prepared, or is not wrapped in DDP.
        RuntimeError: The ranks differ, or the model already has a communication hook.
    """
    attachment_begins(model)
    check_ddp(model, prepared.specs, scatter=prepared.scatter)
    refuse_other_hooks(model)
    device = device_of(model, device)
    group = model.process_group
    model.join_hook = _refuse_join  # type: ignore[method-assign]
    if prepared.options.comes_and_goes:
        return attach_replica(model, prepared, device=device, group=group, mesh=mesh, has_scaler=has_scaler)
    everyone = compare_with_all(model.module, prepared, group, device, mesh, has_scaler=has_scaler)
    prepared = on_ranks(prepared, find_topology(group), None)
    in_rounds = prepared.in_rounds and dist.get_world_size(group) > 1
    if not in_rounds:
        prepared = _without_ignored(model, prepared)
    own_world = device.type == "cpu" or in_rounds
    ranks = make_ranks(group, prepared.topology, device, everyone=everyone, own_world=own_world)
    prepared, sync = make_engine(model.module, prepared, ranks, device, has_scaler=has_scaler)
    if ranks.alone:
        return make_session(model, prepared, sync)
    return make_session(model, prepared, sync, hook=DDPHook(model, sync))


def attach_replica(
    model: nn.Module,
    prepared: PreparedModel,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    has_scaler: bool = False,
) -> Session:
    """Attach to a replica that may join and leave: a process with a whole model. It meets the others in
    `Session.resume`, at the latest before its first forward pass in training.

    Args:
        model: The prepared model, wrapped in DDP or not; its options say where it meets the others.
        prepared: What `prepare` returned.
        device: Device of the gradients; None: that of the parameters.
        group: The group that has only this rank; None: the default group.
        mesh: See `attach_ddp`.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: The replica has several ranks, or other ranks have parts of the model.
        ConnectionError: Nobody answers at the meeting address.
    """
    attachment_begins(model)
    module = model.module if isinstance(model, DistributedDataParallel) else model
    device = device_of(module, device)
    ranks = Ranks.flat(GroupComm(model_group(module, group, device, mesh))).coming_and_going()
    prepared, sync = make_engine(module, prepared, ranks, device, has_scaler=has_scaler)
    return make_session(model, prepared, sync)


def _without_ignored(model: DistributedDataParallel, prepared: PreparedModel) -> PreparedModel:
    """Leave out parameters that DDP ignores or reduces itself, whose gradients it does not pass on."""
    names = {canonical_name(name) for name in model.parameters_to_ignore}
    left_out = [spec.name for spec in prepared.specs if spec.name in names]
    if left_out and dist.get_rank(model.process_group) == 0:
        inform("not compressed, because DDP ignores them or reduces them itself: %s", ", ".join(left_out))
    return replace(prepared, specs=tuple(spec for spec in prepared.specs if spec.name not in names))


def _refuse_join(**options: Any) -> Any:
    raise RuntimeError(
        "torch.distributed.algorithms.Join does not work with compressed gradients: a rank that has no more batches"
        " misses exchanges between the others. Give every rank the same number of batches (DistributedSampler does)"
    )


def check_ddp(model: nn.Module, specs: Sequence[TensorSpec], *, scatter: bool) -> None:
    """Raise a ValueError if `model` is not the prepared model, wrapped in DDP."""
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach_ddp was given a {type(model).__name__}: give it what DistributedDataParallel returned for the"
            " prepared model (for fully_shard it is attach_fsdp)"
        )
    if scatter:
        raise ValueError(
            "the model was prepared with scatter=True, which is for attach_fsdp: leave scatter out for DDP"
        )
    found = {spec.name: spec.shape for spec in describe_parameters(model.module)}
    expected = {spec.name: spec.shape for spec in specs}
    if found != expected:
        name = next(name for name in {**found, **expected} if found.get(name) != expected.get(name))
        raise ValueError(
            f"attach_ddp and prepare were given different models: {name} is {_shape(found.get(name))} in one and"
            f" {_shape(expected.get(name))} in the other. Prepare the model that is wrapped, after freezing what is not"
            " trained"
        )


def _shape(shape: Sequence[int] | None) -> str:
    return "missing or frozen" if shape is None else str(list(shape))


def refuse_other_hooks(model: DistributedDataParallel) -> None:
    """Raise a RuntimeError if DDP calls a different hook with this model's gradients."""
    if model.mixed_precision is not None:
        raise RuntimeError(
            "DistributedDataParallel(mixed_precision=...) reduces gradients in its own communication hook, which"
            " compression would replace: leave it out, and use autocast or the framework's precision"
        )
    if (own := hooked.get(model)) is not None and not own.closed:
        raise RuntimeError("compression is attached to this DistributedDataParallel already: close its session first")
    if model._comm_hooks:
        name = getattr(model._comm_hooks[0][0], "__qualname__", "of its own")
        raise RuntimeError(
            f"the model already has a communication hook ({name}), and DDP calls only one: do not register it"
        )
