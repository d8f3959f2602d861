"""Checks a configuration before the model is wrapped and again on its ranks, which compare their configurations."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lowbit_strategy.attach.optimizer_hook import await_attachment
from lowbit_strategy.attach.part import Part, warn_of_missing_parts
from lowbit_strategy.attach.patterns import unmatched_patterns
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.hooks.ddp import refuse_python_reducer
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.methods.weight_codings import Exact, WeightCoding, default_weights
from lowbit_strategy.model.fingerprint import fingerprint, to_plain
from lowbit_strategy.model.handshake import handshake
from lowbit_strategy.model.parameters import bring_back, describe_parameters, refuse_sparse_gradients
from lowbit_strategy.ranks.topology import Topology

Wrapper = Literal["ddp", "fsdp", "hsdp"]
_log = logging.getLogger("lowbit_strategy")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model that all ranks agree on. Its ranks, and whether FSDP2 has replicas, are known once it is attached.

    Args:
        wrapper: What wraps the model.
        topology: The ranks that average its gradients.
    """

    compressor: Compressor
    options: SyncOptions
    specs: tuple[TensorSpec, ...]
    wrapper: Wrapper
    parts: tuple[Part, ...]  # parts that options add
    topology: Topology = Topology(1)  # noqa: RUF009 (frozen)

    @property
    def scatter(self) -> bool:
        """Whether FSDP2 shards the model."""
        return self.wrapper != "ddp"

    @property
    def weights(self) -> WeightCoding | None:
        """How FSDP2's weights travel. By default exactly under HSDP, where they stay inside a node with fast links."""
        if not self.scatter:
            return None
        unchosen = Exact() if self.wrapper == "hsdp" else default_weights(self.compressor)
        return self.options.weights or unchosen

    @property
    def in_rounds(self) -> bool:
        """Whether ranks, if there are several, meet in rounds and take separate steps in between."""
        return any(part.in_rounds for part in self.parts)


def prepare(
    module: nn.Module,
    compressor: Compressor | str,
    options: SyncOptions | None = None,
    *,
    scatter: bool = False,
    group: dist.ProcessGroup | None = None,
) -> PreparedModel:
    """Check the configuration against the model, on all ranks that train it, which compare parameters and settings.

    Args:
        module: The model, before it is wrapped or sharded, with everything frozen that is not trained.
        compressor: A configuration such as ``LoCo(bits=4)``, or a preset's name.
        options: All other options; None: the defaults.
        scatter: False: it will be wrapped in DDP; True: sharded with ``fully_shard``.
        group: The ranks that have the same parameters; None: all.

    Raises:
        ValueError: The model is wrapped, the compressor does not support one of its parameters, or there is nothing to
            train.
        RuntimeError: The ranks differ, or a compiler setting bypasses hooks.
    """
    prepared = checked(module, compressor, options, scatter=scatter)
    facts = fingerprint(prepared.compressor, module, scatter=scatter, settings=settings_of(prepared.options))
    handshake(facts, group)
    if dist.get_rank(group) == 0:
        for sentence in unmatched_patterns(prepared.compressor, module):
            _log.warning("%s", sentence)
        warn_of_missing_parts(prepared.options)
    await_attachment(module)
    return prepared


def checked(
    module: nn.Module, compressor: Compressor | str, options: SyncOptions | None = None, *, scatter: bool
) -> PreparedModel:
    """The result of `prepare`, checked on this rank alone.

    Raises:
        ValueError: See `prepare`.
        RuntimeError: A compiler setting bypasses hooks.
    """
    if isinstance(module, (DistributedDataParallel, DataParallel, FullyShardedDataParallel)):
        others = {DistributedDataParallel: "then wrap it", DataParallel: "and wrap it in DistributedDataParallel"}
        then = others.get(type(module), "and shard it with fully_shard: FSDP1 cannot be compressed")
        raise ValueError(f"prepare was given a {type(module).__name__}: give it the bare model, {then}")
    compressor = as_compressor(compressor)
    options = SyncOptions() if options is None else options
    bring_back(module)
    options.check_wrapper(scatter=scatter)
    specs = tuple(describe_parameters(module))
    if not specs:
        raise ValueError("the model has no parameter that requires a gradient: nothing to synchronize")
    refuse_sparse_gradients(module)
    for part in options.parts:
        part.check_model(compressor, specs)
    if not scatter:
        refuse_python_reducer()
    return PreparedModel(compressor, options, specs, "fsdp" if scatter else "ddp", tuple(options.parts))


def on_ranks(prepared: PreparedModel, topology: Topology, shard_size: int | None) -> PreparedModel:
    """Adapt a checked configuration to the actual ranks. `shard_size`: HSDP: how many ranks share one model.

    Raises:
        ValueError: An option does not suit these ranks.
    """
    options = prepared.options
    if options.two_level and topology.obstacle is not None:
        raise ValueError(f"two_level=True is not possible, because {topology.obstacle}: leave it out")
    node_size, wrapper = shard_size, prepared.wrapper if shard_size is None else "hsdp"
    if shard_size is None and topology.obstacle is None and options.two_level is not False and not prepared.in_rounds:
        node_size = topology.ranks_per_node
    prepared = replace(prepared, wrapper=wrapper, topology=replace(topology, node_size=node_size))
    for part in prepared.parts:
        prepared = part.on_ranks(prepared)
    return prepared


def settings_of(options: SyncOptions) -> dict[str, object]:
    """All options as plain values, by dotted names."""
    named = [(field.name, getattr(options, field.name)) for field in fields(options)]
    return {name: value for option in named for name, value in to_plain(*option).items()}
