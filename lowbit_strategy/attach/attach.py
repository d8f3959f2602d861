"""Attaching compression to a model: what every framework's adapter calls, in this order.

1. `prepare` before the model is wrapped: validates, and all ranks compare their settings
2. wrap the model (DDP or FSDP2), then `attach_ddp` or `attach_fsdp`
3. `Session.begin_step` before every backward pass, `Session.end_step` after every optimizer step
4. `Session.save`, `load` and `resume` with the framework's checkpoints; `Session.finish` and `Session.close` at the end
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.choosing import choose_for_ddp, choose_for_fsdp, is_to_choose
from lowbit_strategy.attach.digest import ParameterDigest
from lowbit_strategy.attach.fit import fitted
from lowbit_strategy.attach.local_steps import local_steps
from lowbit_strategy.attach.order_checks import check_bare, check_ddp, check_fsdp
from lowbit_strategy.attach.replica import membership_of, one_replica
from lowbit_strategy.attach.session import Hook, Session
from lowbit_strategy.attach.sync_options import SyncOptions, check_elastic, check_outer
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks import fsdp
from lowbit_strategy.hooks.ddp import DDPHook, refuse_python_reducer
from lowbit_strategy.hooks.weights import install_weights, module_layouts
from lowbit_strategy.hooks.worker import BackwardSide
from lowbit_strategy.methods._base.compressor import Compressor, assign_all
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.auto import Auto
from lowbit_strategy.methods.quantization.dense import Dense
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.methods.weights.base import WeightCoding
from lowbit_strategy.methods.weights.exact import Exact
from lowbit_strategy.methods.weights.registry import check_weights, default_weights
from lowbit_strategy.model.fsdp_sharding import (
    broadcast_shards,
    check_process_groups,
    sharded_groups,
    take_over_replication,
)
from lowbit_strategy.model.handshake import facts, handshake, plain
from lowbit_strategy.model.parameters import canonical_name, describe_parameters, refuse_sparse_gradients
from lowbit_strategy.model.unmatched_patterns import unmatched_patterns
from lowbit_strategy.plan.gradients import Layout, Reduced, ddp_buckets
from lowbit_strategy.ranks.ranks import Ranks, make_ranks
from lowbit_strategy.ranks.shape import Shape
from lowbit_strategy.ranks.topology import Topology, find_topology, resolve_shard_size
from lowbit_strategy.telemetry.inform import inform
from lowbit_strategy.telemetry.startup_report import build_report

_log = logging.getLogger("lowbit_strategy")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that all ranks agree on."""

    compressor: Compressor
    options: SyncOptions
    specs: tuple[TensorSpec, ...]
    scatter: bool
    topology: Topology
    shard_size: int | None = None

    @property
    def layout(self) -> Layout:
        """What wraps the model."""
        return "ddp" if not self.scatter else "fsdp" if self.shard_size is None else "hsdp"

    @property
    def node_size(self) -> int | None:
        """Ranks of a node, where they have two levels."""
        one_level = self.options.two_level is False or self.options.outer is not None  # local steps: of each rank
        if self.shard_size is not None or one_level or self.topology.obstacle is not None:
            return None
        return self.topology.ranks_per_node


def prepare(
    module: nn.Module,
    compressor: Compressor | str,
    options: SyncOptions | None = None,
    *,
    scatter: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Prepared:
    """Check the configuration against the model, on all ranks together.

    Args:
        module: The model, before it is wrapped or sharded, with everything frozen that is not trained.
        compressor: A configuration such as ``LoCo(bits=4)``, or a preset's name.
        options: What stands beside the compressor; None: the defaults.
        scatter: False: it will be wrapped in DDP; True: sharded with ``fully_shard``.
        group: All ranks that train it; None: all ranks.

    Raises:
        ValueError: The model is wrapped, the compressor cannot serve a parameter of it, or there is nothing to train.
        RuntimeError: The ranks differ, or a compiler setting bypasses hooks.
    """
    check_bare(module)
    compressor = as_compressor(compressor)
    options = SyncOptions() if options is None else options
    specs = checked_specs(module, compressor, options, scatter=scatter)
    handshake(facts(compressor, module, scatter=scatter, settings=_settings(options)), group)
    if dist.get_rank(group) == 0:
        for sentence in unmatched_patterns(compressor, module):
            _log.warning("%s", sentence)
    return prepared_for(find_topology(group), compressor, options, specs, scatter=scatter)


def checked_specs(
    module: nn.Module, compressor: Compressor, options: SyncOptions, *, scatter: bool
) -> tuple[TensorSpec, ...]:
    """The parameters to synchronise, if model, compressor and options go together; asks no other rank.

    Raises:
        ValueError: They do not.
        RuntimeError: A compiler setting bypasses hooks.
    """
    if options.shard_size is not None and not scatter:
        raise ValueError("shard_size is an option of FSDP2 strategies: under DDP no rank has a shard")
    specs = tuple(describe_parameters(module))
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient: nothing to synchronise")
    refuse_sparse_gradients(module)
    check_outer(options.outer, two_level=options.two_level, scatter=scatter, shard_size=options.shard_size)
    check_elastic(options.elastic, options.outer, scatter=scatter)
    if isinstance(compressor, Auto) and options.outer is not None:
        raise ValueError("Auto chooses what every step sends, and outer= sends in some steps only: give a compressor")
    if options.outer is not None:
        options.outer.check(assign_all(compressor, specs))
        if options.outer.synchronous_compressor is not None:
            options.outer.synchronous_compressor.check(specs)
    if not scatter:
        refuse_python_reducer()
    check_weights(options.weights, scatter=scatter)
    return specs


def prepared_for(
    topology: Topology, compressor: Compressor, options: SyncOptions, specs: tuple[TensorSpec, ...], *, scatter: bool
) -> Prepared:
    """What has been checked, on these nodes.

    Raises:
        ValueError: `two_level` or `shard_size` does not suit them.
    """
    if options.two_level and topology.obstacle is not None:
        raise ValueError(f"two_level=True is not possible, because {topology.obstacle}: leave it out")
    shard_size = None if options.shard_size is None else resolve_shard_size(options.shard_size, topology)
    return Prepared(compressor, options, specs, scatter, topology, shard_size)


def _settings(options: SyncOptions) -> dict[str, object]:
    """The options as plain values."""
    plainly = {field.name: getattr(options, field.name) for field in fields(options)}
    return plainly | plain("weights", plainly["weights"])


def warn_of_one_rank() -> None:
    """Logged in all frameworks alike, once per run."""
    _log.warning("lowbit_strategy: one rank: gradients are not sent to anybody, so nothing is compressed")


def attach_ddp(
    model: DistributedDataParallel, prepared: Prepared, *, device: torch.device | None = None, has_scaler: bool = False
) -> Session:
    """Register the hook, unless there is one rank only.

    On CPU, and for local steps, a group of its own, as patient as DDP's, keeps its collectives apart from DDP's.

    Args:
        model: What was prepared, in ``DistributedDataParallel``.
        prepared: By `prepare`.
        device: Of the gradients; None: of the parameters.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: `model` is not what was prepared, or not wrapped in DDP.
        RuntimeError: The ranks differ, or the model has a communication hook already.
    """
    check_ddp(model, prepared.specs, scatter=prepared.scatter)
    device = _device_of(model) if device is None else device
    group = model.process_group
    handshake(_circumstances(device, has_scaler), group)
    model.join_hook = _refuse_join  # type: ignore[method-assign]
    membership = membership_of(prepared.compressor, prepared.options, model.module, _settings(prepared.options), group)
    rule = prepared.options.outer if dist.get_world_size(group) > 1 or membership is not None else None
    ranks = Ranks.coming_and_going()
    if membership is None:
        own_world = device.type == "cpu" or rule is not None
        ranks = make_ranks(
            group,
            prepared.topology,
            prepared.node_size,
            device,
            scatter=False,
            own_world=own_world,
            far=prepared.options.far_links,
        )
    prepared = fitted(prepared, None, ranks, device)
    sync = make_engine(prepared, ranks, device, has_scaler=has_scaler)
    sync.expect(_ddp_buckets(model, sync, model.bucket_bytes_cap))
    hook: Hook | None = None
    choice = None
    if is_to_choose(prepared, sync):
        hook, choice = choose_for_ddp(model, prepared, sync, group)
        sync.expect(_ddp_buckets(model, sync, hook.cap_nbytes))
    elif not ranks.alone and (rule is None or not rule.always_local):
        hook = DDPHook(model, sync)
    compares = prepared.options.check_digest and not ranks.alone and membership is None
    local = None
    if rule is not None:
        local = local_steps(model.module, sync, rule, check_digest=compares, ddp=model, membership=membership)
    session = Session(
        sync,
        model.module,
        prepared.options,
        group=group,
        hook=hook,
        ranks=ranks,
        digest=ParameterDigest(_replicated(model), ranks.world, device) if compares else None,
        local=local,
        auto=choice,
    )
    session.close_with(model)
    _report(sync)
    return session


def _ddp_buckets(model: DistributedDataParallel, sync: GradientSync, cap_nbytes: int) -> list[Reduced]:
    """What DDP will put together once it knows the order of gradients."""
    params = [(canonical_name(name), param) for name, param in model.module.named_parameters()]
    trained = [(name, param.numel(), param.element_size()) for name, param in params if name in sync.specs]
    return ddp_buckets(trained, cap_nbytes)


def _replicated(model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """What DDP keeps the same on all ranks: all parameters that it does not ignore."""
    ignored = model.parameters_to_ignore
    return {canonical_name(name): param for name, param in model.module.named_parameters() if name not in ignored}


def attach_fsdp(
    module: nn.Module,
    prepared: Prepared,
    *,
    device: torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    has_scaler: bool = False,
) -> Session:
    """Give every FSDP2 module under `module` its compressed reduce-scatter.

    Args:
        module: What was prepared, after ``fully_shard``.
        prepared: By `prepare`, with ``scatter=True``.
        device: Of the gradients; None: of the parameters.
        group: All ranks that train it; None: all ranks.
        has_scaler: Whether a loss scaler is used (float16).

    Raises:
        ValueError: `module` has no FSDP2 module, or is sharded in a way that cannot be compressed.
    """
    check_fsdp(module, scatter=prepared.scatter)
    if not any(True for _ in sharded_groups(module)):
        raise ValueError("no module is sharded with fully_shard: nothing to compress")
    device = _device_of(module) if device is None else device
    handshake(_circumstances(device, has_scaler), group)
    if prepared.shard_size is not None:
        return _attach_hsdp(module, prepared, prepared.shard_size, device, group, has_scaler)
    far = prepared.options.far_links
    ranks = make_ranks(group, prepared.topology, prepared.node_size, device, scatter=True, far=far)
    prepared = fitted(prepared, weight_coding(prepared), ranks, device, module_layouts(module))
    sync = make_engine(prepared, ranks, device, has_scaler=has_scaler)
    check_process_groups(module, group, replicated=False)
    side = BackwardSide(device) if ranks.reduces_meanwhile else None
    choice = None
    if is_to_choose(prepared, sync):
        choice = choose_for_fsdp(module, prepared, sync, lambda: ranks.gathering(sharded_inside=False), group)
    else:
        fsdp.install(module, sync, side)
        install_weights(module, weight_coding(prepared), sync, ranks.gathering(sharded_inside=False))
    _report(sync)
    return Session(sync, module, prepared.options, group=group, hook=side, ranks=ranks, shards=True, auto=choice)


def _attach_hsdp(
    module: nn.Module,
    prepared: Prepared,
    shard_size: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    has_scaler: bool,
) -> Session:
    """Sharded over `shard_size` ranks, the engine between the replicas; the first replica's weights for all."""
    far = prepared.options.far_links
    ranks = make_ranks(group, prepared.topology, shard_size, device, scatter=False, far=far)
    assert ranks.intra_node is not None
    check_process_groups(module, ranks.intra_node.group, replicated=True)
    same = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if not ParameterDigest(same, ranks.peers, device).agree():
        broadcast_shards(module, ranks.peers.group)
    prepared = fitted(prepared, weight_coding(prepared), ranks, device, module_layouts(module))
    sync = make_engine(prepared, ranks, device, has_scaler=has_scaler)
    side = BackwardSide(_with_index(device))
    choice = None
    if is_to_choose(prepared, sync):
        choice = choose_for_fsdp(module, prepared, sync, lambda: ranks.gathering(sharded_inside=True), group, side=side)
    else:
        take_over_replication(module)
        fsdp.install_replicas(module, sync, ranks.intra_node, side)
        install_weights(module, weight_coding(prepared), sync, ranks.gathering(sharded_inside=True))
    compares = prepared.options.check_digest and not ranks.alone
    shards = {canonical_name(name): param for name, param in module.named_parameters()}
    digest = ParameterDigest(shards, ranks.peers, device) if compares else None
    rule = prepared.options.outer if not ranks.alone else None
    local = None if rule is None else local_steps(module, sync, rule, check_digest=compares)
    _report(sync)
    return Session(
        sync,
        module,
        prepared.options,
        group=group,
        hook=side,
        ranks=ranks,
        digest=digest,
        local=local,
        shards=True,
        auto=choice,
    )


def weight_coding(prepared: Prepared) -> WeightCoding:
    """How weights are coded: exactly where they stay inside a node, whose links are fast, unless chosen otherwise."""
    unchosen = Exact() if prepared.shard_size is not None else default_weights(prepared.compressor)
    return prepared.options.weights or unchosen


def _circumstances(device: torch.device, has_scaler: bool) -> dict[str, object]:
    """What must be the same on all ranks and is known only when the model has been wrapped."""
    return {"gradient scaler": "one" if has_scaler else "none", "type of device": device.type}


def _refuse_join(**options: Any) -> Any:
    raise RuntimeError(
        "torch.distributed.algorithms.Join does not work with compressed gradients: a rank that has no more batches"
        " misses exchanges between the others. Give every rank the same number of batches (DistributedSampler does)"
    )


def used_compressor(prepared: Prepared, shape: Shape) -> Compressor:
    """One rank alone keeps no residuals, save what a checkpoint brings along."""
    return Dense() if shape.num_peers == 1 else prepared.compressor


def make_engine(prepared: Prepared, ranks: Ranks, device: torch.device, *, has_scaler: bool) -> GradientSync:
    """The engine of a prepared model, before anything calls it."""
    options = prepared.options
    sync = GradientSync(
        prepared.compressor if ranks.replica is not None else used_compressor(prepared, ranks.shape),
        prepared.specs,
        ranks,
        _with_index(device),
        scatter=prepared.scatter and prepared.shard_size is None,
        seed=options.seed,
        rollback=has_scaler if options.rollback is None else options.rollback,
    )
    if ranks.replica is not None:
        return sync
    if ranks.world_size == 1:
        warn_of_one_rank()
    elif ranks.alone and ranks.rank == 0:
        _log.warning("%s", one_replica(options))
    return sync


def _report(sync: GradientSync) -> None:
    """Called when everything is attached: only then the memory for messages is known."""
    if sync.ranks.rank == 0 and sync.ranks.peers.world_size > 1 and not isinstance(sync.compressor, Auto):
        inform("%s", build_report(sync).render())


def _device_of(module: nn.Module) -> torch.device:
    return next(param.device for param in module.parameters() if param.requires_grad)


def _with_index(device: torch.device) -> torch.device:
    """Futures and streams need the index of the device that "cuda" stands for."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
