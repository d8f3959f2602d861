"""Attaching compression to a model: what every framework's adapter calls, in this order.

1. `prepare.prepare` before the model is wrapped: validates, and all ranks compare their settings
2. wrap the model (DDP or FSDP2), then `attach_ddp` or `attach_fsdp`
3. `Session.begin_step` before every backward pass, `Session.end_step` after every optimizer step
4. `Session.save`, `load` and `resume` with the framework's checkpoints; `Session.finish` and `Session.close` at the end
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.checks import check_ddp, check_whole_model, one_replica
from lowbit_strategy.attach.prepare import PreparedModel, on_ranks, settings_of
from lowbit_strategy.attach.rounds import EveryStep
from lowbit_strategy.attach.session import Hook, Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import Comm, GroupComm, LocalComm
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.all_gather import module_layouts
from lowbit_strategy.hooks.ddp import DDPHook, DDPWiring, refuse_other_hooks
from lowbit_strategy.hooks.fsdp import FSDPWiring
from lowbit_strategy.inform import inform
from lowbit_strategy.methods._base.chooser import Choice, Chooser
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.model.digest import ParameterDigest
from lowbit_strategy.model.fsdp_sharding import (
    ShardedGroup,
    check_held,
    reshard,
    sharded_groups,
    sharded_parameters,
)
from lowbit_strategy.model.mesh import (
    Rows,
    by_rows,
    check_parts,
    describe_dims,
    give_replicas,
    group_of,
    has_other_parts,
    is_hybrid,
    mesh_like,
    model_group,
    name_of,
    rows_of,
    shard_group,
)
from lowbit_strategy.model.parameters import (
    canonical_name,
    describe_parameters,
    handshake,
    local_part,
    named_parameters,
    settings_facts,
)
from lowbit_strategy.plan.gradients import ParamGroup, ddp_buckets
from lowbit_strategy.plan.weight_bytes import ModuleLayout
from lowbit_strategy.ranks.ranks import Ranks, Topology, find_topology, make_ranks
from lowbit_strategy.telemetry.startup_report import render_reports
from lowbit_strategy.telemetry.step_times import StepTimes

_log = logging.getLogger("lowbit_strategy")


def warn_of_one_rank() -> None:
    """Logged in the same way in all frameworks, once per run."""
    _log.warning("lowbit_strategy: one rank: gradients are not sent to anybody, so nothing is compressed")


def attach_ddp(
    model: DistributedDataParallel,
    prepared: PreparedModel,
    *,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
    has_scaler: bool = False,
) -> Session:
    """Register the hook, unless there is only one rank. Gradients are a mean over the ranks of DDP's process group.

    On CPU, and where ranks meet in rounds, its collectives have their own process group, with DDP's timeout.

    Args:
        model: What was prepared, in ``DistributedDataParallel``.
        prepared: What `prepare` returned.
        device: Device of the gradients; None: that of the parameters.
        mesh: All ranks that hold a part of the model, where its parameters do not show it.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: `model` is not what was prepared, or not wrapped in DDP.
        RuntimeError: The ranks differ, or the model has a communication hook already.
    """
    check_ddp(model, prepared.specs, scatter=prepared.scatter)
    refuse_other_hooks(model)
    device = _device_of(model, device)
    options, group = prepared.options, model.process_group
    model.join_hook = _refuse_join  # type: ignore[method-assign]
    rule = options.rounds
    if rule is not None and rule.comes_and_goes:
        session = attach_replica(model.module, prepared, device=device, group=group, has_scaler=has_scaler, ddp=model)
        session.close_with(model)
        return session
    meet = None if rule is None else rule.registered(prepared, model.module, group)
    everyone = _compare_with_all(model.module, prepared, group, device, mesh, has_scaler=has_scaler)
    prepared = on_ranks(prepared, find_topology(group), None)
    rule = rule if dist.get_world_size(group) > 1 else None
    if rule is None:
        prepared = _without_ignored(model, prepared)
    own_world = device.type == "cpu" or rule is not None
    far, dims = options.far_links, describe_dims(getattr(model, "device_mesh", None))
    ranks = make_ranks(group, prepared.topology, device, everyone=everyone, own_world=own_world, far=far, dims=dims)
    prepared, sync = make_engine(prepared, ranks, device, has_scaler=has_scaler)
    check_whole_model(model.module, sync)
    sync.expect(_ddp_buckets(model, sync, model.bucket_bytes_cap))
    hook: DDPHook | DDPWiring | None = None
    choice = None
    if isinstance(prepared.compressor, Chooser) and not ranks.alone:
        hook = DDPWiring(model, sync)
        choice = prepared.compressor.begin(prepared, sync, hook, everyone)
        sync.expect(_ddp_buckets(model, sync, hook.cap_nbytes))
    elif not ranks.alone and (rule is None or rule.begins_in_steps):
        hook = DDPHook(model, sync)
    module, ignored = model.module, model.parameters_to_ignore  # the digest must not keep the wrapper alive
    digest = ParameterDigest(lambda: _named(module, ignored), _digest_comm(ranks, group), device)
    session = _session(
        module, prepared, sync, everyone, hook=hook, digests=[digest], choice=choice, ddp=model, meet=meet
    )
    session.close_with(model)
    return session


def attach_replica(
    module: nn.Module,
    prepared: PreparedModel,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    has_scaler: bool = False,
    ddp: DistributedDataParallel | None = None,
) -> Session:
    """A replica that may join and leave: a process with a whole model, which meets the others in `Session.resume`, at
    the latest before its first forward pass in training.

    Args:
        module: What was prepared, with options that say where it meets the others.
        prepared: What `prepare` returned.
        device: Device of the gradients; None: that of the parameters.
        group: This one rank; None: the default group, which has only this rank.
        has_scaler: Whether a loss scaler is used (float16).
        ddp: Around `module`, if it is wrapped.

    Raises:
        ValueError: The replica has several ranks.
        ConnectionError: Nobody answers at the lighthouse's address.
    """
    device = _device_of(module, device)
    assert prepared.options.rounds is not None
    meet = prepared.options.rounds.registered(prepared, module, group)
    ranks = Ranks.flat(LocalComm()).coming_and_going()
    prepared, sync = make_engine(prepared, ranks, device, has_scaler=has_scaler)
    return _session(module, prepared, sync, group, ddp=ddp, meet=meet)


def _ddp_buckets(model: DistributedDataParallel, sync: GradientSync, cap_nbytes: int) -> list[ParamGroup]:
    """The buckets that DDP will make once it knows the order of gradients."""
    params = named_parameters(model.module)
    trained = [(name, param.numel(), param.element_size()) for name, param in params if name in sync.specs]
    return ddp_buckets(trained, cap_nbytes)


def _without_ignored(model: DistributedDataParallel, prepared: PreparedModel) -> PreparedModel:
    """DDP passes no gradients of parameters that it ignores or reduces itself."""
    names = {canonical_name(name) for name in model.parameters_to_ignore}
    left_out = [spec.name for spec in prepared.specs if spec.name in names]
    if left_out and dist.get_rank(model.process_group) == 0:
        inform("not compressed, because DDP ignores them or reduces them by itself: %s", ", ".join(left_out))
    return replace(prepared, specs=tuple(spec for spec in prepared.specs if spec.name not in names))


def _named(module: nn.Module, ignored: Iterable[str]) -> dict[str, nn.Parameter]:
    """The parameters that DDP keeps equal on all ranks: those that it does not ignore."""
    names = {canonical_name(name) for name in ignored}
    return {name: param for name, param in named_parameters(module) if name not in names}


def attach_fsdp(
    module: nn.Module,
    prepared: PreparedModel,
    *,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
    has_scaler: bool = False,
) -> Session:
    """Give every FSDP2 module under `module` its compressed reduce-scatter. Gradients are a mean over the ranks that
    ``fully_shard`` was given.

    Args:
        module: What was prepared, after ``fully_shard``.
        prepared: What `prepare` returned, with ``scatter=True``.
        device: Device of the gradients; None: that of the parameters.
        mesh: All ranks that hold a part of the model, where its parameters do not show it.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: `module` has no FSDP2 module, or is sharded in a way that cannot be compressed.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError("attach_fsdp was given a DistributedDataParallel: for DDP it is attach_ddp")
    if not prepared.scatter:
        raise ValueError("the model was prepared for DDP: give prepare scatter=True, which attach_fsdp needs")
    if not (groups := sharded_groups(module)):
        raise ValueError("no module is sharded with fully_shard: nothing to compress")
    reshard(module)  # a forward pass without a backward pass leaves it gathered
    check_held(module, groups)
    device = _device_of(module, device)
    by_mesh = by_rows(groups)
    check_parts(by_mesh, groups)
    (rows, own), *elsewhere = by_mesh.items()
    for part in prepared.parts if elsewhere else ():
        part.check_meshes()
    of_own, replicas = own[0].param_group.mesh_info.mesh, None
    if prepared.options.shard_size is not None and not is_hybrid(own[0]):
        of_own = replicas = mesh_like(rows[0], device.type)  # they are asked for, and a mesh of one dim has none
        rows = rows_of(replicas)
    group = group_of([rank for row in rows for rank in row], shard_group(own[0]), device)
    everyone = _compare_with_all(module, prepared, group, device, mesh, has_scaler=has_scaler)
    topology, is_hsdp = find_topology(group), of_own.ndim > 1
    _check_shard_size(prepared.options, len(rows[0]), topology)
    prepared = on_ranks(prepared, topology, len(rows[0]) if is_hsdp else None)
    ranks = _ranks(prepared, group, device, everyone, of_own)
    others: dict[str, Ranks] = {}
    for rows_too, found in elsewhere:
        others |= dict.fromkeys(_names(module, found), _ranks_beside(prepared, rows_too, found, device, everyone))
    shared = {each.name for found in by_mesh.values() for each in found}
    groups = [each for each in groups if each.name in shared]
    prepared = replace(prepared, specs=_exchanged(module, groups, rows))
    rule = prepared.options.rounds
    meet = None if rule is None else rule.registered(prepared, module, group)
    if is_hsdp:
        if rule is not None and rule.comes_and_goes:  # all ranks share one model, which is one replica
            ranks = ranks.coming_and_going()
        _share_weights(module, ranks, others, device)
    if replicas is not None:
        give_replicas(groups, replicas)
    layouts = module_layouts(module, groups)
    prepared, sync = make_engine(prepared, ranks, device, has_scaler=has_scaler, modules=layouts, others=others)
    check_whole_model(module, sync)
    wiring = FSDPWiring(module, groups, sync)
    wiring.take(prepared.weights)  # what cannot be served is refused now
    choice = None
    if isinstance(prepared.compressor, Chooser) and not ranks.alone:
        wiring.give_back()
        choice = prepared.compressor.begin(prepared, sync, wiring, everyone)
    digests = _digests(module, sync) if is_hsdp else []
    return _session(module, prepared, sync, everyone, hook=wiring, digests=digests, choice=choice, meet=meet)


def _ranks(
    prepared: PreparedModel,
    group: dist.ProcessGroup | None,
    device: torch.device,
    everyone: dist.ProcessGroup | None,
    mesh: DeviceMesh,
) -> Ranks:
    far, dims = prepared.options.far_links, describe_dims(mesh)
    return make_ranks(group, prepared.topology, device, everyone=everyone, far=far, dims=dims)


def _ranks_beside(
    prepared: PreparedModel,
    rows: Rows,
    found: Sequence[ShardedGroup],
    device: torch.device,
    everyone: dist.ProcessGroup | None,
) -> Ranks:
    """Who reduces what is on another mesh than the most parameters.

    Raises:
        ValueError: One of the two has replicas and the other has not.
    """
    size = len(rows[0]) if is_hybrid(found[0]) else None
    if (size is None) != (prepared.layout != "hsdp"):
        one, other = ("sharded", "replicated, too") if size is None else ("replicated, too", "sharded")
        raise ValueError(
            f"{name_of(found[0])} is {one}, and the rest of the model is {other} (HSDP): give fully_shard a mesh of"
            " (replicas, ranks that shard) for both"
        )
    group = group_of([rank for row in rows for rank in row], shard_group(found[0]), device)
    prepared = on_ranks(prepared, find_topology(group), size)
    return _ranks(prepared, group, device, everyone, found[0].param_group.mesh_info.mesh)


def _names(module: nn.Module, groups: Sequence[ShardedGroup]) -> list[str]:
    """The parameters of these groups."""
    names = {id(param): name for name, param in sharded_parameters(module).items()}
    return [names[id(param.sharded_param)] for each in groups for param in each.param_group.fsdp_params]


def _exchanged(module: nn.Module, groups: Sequence[ShardedGroup], rows: Rows) -> tuple[TensorSpec, ...]:
    """What is trained and has a gradient that is a mean over several ranks, as it is on the mesh."""
    shared = {id(param.sharded_param) for each in groups for param in each.param_group.fsdp_params}
    alone = {id(param.sharded_param) for each in sharded_groups(module) for param in each.param_group.fsdp_params}
    alone -= shared
    left = {
        name
        for name, param in sharded_parameters(module).items()
        if id(param) in alone or (id(param) not in shared and has_other_parts(param, ((dist.get_rank(),),), rows))
    }
    return tuple(spec for spec in describe_parameters(module) if spec.name not in left)


def _digests(module: nn.Module, sync: GradientSync) -> list[ParameterDigest]:
    """HSDP: one for the ranks that have the same shards, mesh by mesh."""

    def of(ranks: Ranks) -> dict[str, nn.Parameter]:
        return {name: p for name, p in sharded_parameters(module).items() if sync.state.ranks_of(name) is ranks}

    return [ParameterDigest(functools.partial(of, ranks), ranks.peers, sync.device) for ranks in sync.all_ranks]


def _check_shard_size(options: SyncOptions, found: int, topology: Topology) -> None:
    """Raises:
    ValueError: The option says otherwise than the mesh of the model.
    """
    asked = topology.ranks_per_node if options.shard_size == "node" else options.shard_size
    if asked not in (None, found):
        raise ValueError(
            f"shard_size={options.shard_size!r} was asked for, and the model is sharded over {found} ranks: leave"
            " shard_size out, and the mesh that fully_shard was given says it"
        )


def _compare_with_all(
    module: nn.Module,
    prepared: PreparedModel,
    group: dist.ProcessGroup | None,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    has_scaler: bool,
) -> dist.ProcessGroup | None:
    """All ranks that hold a part of the model, once they have compared everything but its parameters, which only those
    of `group` share.
    """
    everyone = model_group(module, group, device, mesh)
    facts = settings_facts(prepared.compressor, scatter=prepared.scatter, settings=settings_of(prepared.options))
    handshake(facts | {"gradient scaler": "one" if has_scaler else "none", "type of device": device.type}, everyone)
    return everyone


def _digest_comm(ranks: Ranks, group: dist.ProcessGroup | None) -> Comm:
    """The communicator of the ranks that hold the same parameters under DDP."""
    return ranks.world if ranks.world.world_size == ranks.world_size else GroupComm(group)


def _share_weights(module: nn.Module, ranks: Ranks, others: Mapping[str, Ranks], device: torch.device) -> None:
    """HSDP: the ranks of a node share one model, and all replicas get the weights of the first."""
    held: dict[Comm, dict[str, Tensor]] = {ranks.peers: dict(module.named_buffers())}
    for name, param in named_parameters(module):
        held.setdefault(others.get(name, ranks).peers, {})[name] = param
    for peers, same in held.items():
        if not ParameterDigest(functools.partial(dict, same), peers, device).agree():
            _broadcast_shards(same.values(), peers.group)


def _session(
    module: nn.Module,
    prepared: PreparedModel,
    sync: GradientSync,
    group: dist.ProcessGroup | None,
    *,
    hook: Hook | None = None,
    digests: Sequence[ParameterDigest] = (),
    choice: Choice | None = None,
    ddp: DistributedDataParallel | None = None,
    meet: Callable[..., EveryStep] | None = None,
) -> Session:
    """The session around a model's engine. `digests`: compare parameters; `meet`: lets ranks meet in rounds."""
    options, ranks = prepared.options, sync.ranks
    if not ranks.alone:
        for part in prepared.parts:
            part.attach(sync, module, prepared)
    compares = options.check_digest and not ranks.alone and not ranks.comes_and_goes
    pace = None
    if meet is not None and not ranks.alone:
        pace = meet(module, sync, check_digest=compares, ddp=ddp)
    session = Session(
        sync,
        module,
        options,
        group=group,
        hook=hook,
        digests=digests if compares else (),
        pace=pace,
        shards=prepared.scatter,
        choice=choice,
    )
    _report(sync, options)
    session.pace.attached(session, module)
    return session


def _refuse_join(**options: Any) -> Any:
    raise RuntimeError(
        "torch.distributed.algorithms.Join does not work with compressed gradients: a rank that has no more batches"
        " misses exchanges between the others. Give every rank the same number of batches (DistributedSampler does)"
    )


def make_engine(
    prepared: PreparedModel,
    ranks: Ranks,
    device: torch.device,
    *,
    has_scaler: bool,
    modules: Mapping[str, ModuleLayout] | None = None,
    others: Mapping[str, Ranks] | None = None,
) -> tuple[PreparedModel, GradientSync]:
    """A prepared model, fitted to the memory, and its engine. A single rank only keeps the residuals that a checkpoint
    brings along. `modules`: what FSDP2 gathers as one. `others`: see `GradientSync`.
    """
    fewest = min((ranks, *(others or {}).values()), key=lambda each: each.world_size)  # where each keeps most
    for part in () if fewest.alone else prepared.parts:
        prepared = part.fitted(prepared, fewest, device, modules or {})
    options = prepared.options
    sync = GradientSync(
        Dense() if ranks.alone else prepared.compressor,
        prepared.specs,
        ranks,
        device,
        scatter=prepared.layout == "fsdp",
        others=others,
        seed=options.seed,
        skips_overflow=has_scaler,
        keeps_copies=options.rollback,
        max_residual=options.max_residual,
        follows_rate=options.follows_rate,
    )
    if ranks.world_size == 1 and not ranks.comes_and_goes:
        warn_of_one_rank()
    elif ranks.alone and ranks.logs:  # of replicas that come and go none is
        _log.warning("%s", one_replica(options))
    return prepared, sync


def _report(sync: GradientSync, options: SyncOptions) -> None:
    """Called last: only then the memory for messages is known."""
    if sync.ranks.peers.world_size == 1 or isinstance(sync.compressor, Chooser):
        return
    if sync.ranks.logs:
        inform("%s", render_reports(sync))
        if options.rounds is None:
            StepTimes(sync)


def _device_of(module: nn.Module, device: torch.device | None) -> torch.device:
    """The one that was given, or that of the parameters; with the index that futures and streams need."""
    if device is None:
        device = next(param.device for param in module.parameters() if param.requires_grad)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _broadcast_shards(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """All replicas get the shards of the first one; `group` has the ranks with the same shard."""
    for tensor in tensors:
        if (local := local_part(tensor.detach())).numel():
            dist.broadcast(local, group_src=0, group=group)
