"""Registers a replica with the others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from lowbit_strategy.attach.pace import Pace
from lowbit_strategy.attach.part import Part
from lowbit_strategy.attach.prepare import PreparedModel, settings_of
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.elastic.membership import Membership
from lowbit_strategy.elastic.options import Elastic
from lowbit_strategy.elastic.replica import ElasticOuterSync
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.model.fingerprint import fingerprint
from lowbit_strategy.model.parameters import named_parameters
from lowbit_strategy.ranks.groups import new_group

_NO_TIMEOUT = timedelta(days=30)


class RoundsOfReplicas(Part):
    """Local steps whose members are found again for every fragment."""

    in_rounds: ClassVar[bool] = True

    def __init__(self, rule: OuterRule, membership: Membership) -> None:
        self._rule, self._membership = rule, membership

    def attach(self, sync: GradientSync, module: nn.Module, prepared: PreparedModel) -> Pace:
        make_outer = partial(ElasticOuterSync, membership=self._membership)
        return self._rule.attach(sync, module, prepared, make_outer=make_outer)


def registered(
    elastic: Elastic, prepared: PreparedModel, module: nn.Module, group: dist.ProcessGroup | None
) -> PreparedModel:
    """Register this replica with the others, which it meets in `Session.resume`. Call it on all of its ranks.

    Raises:
        ValueError: There are several ranks, and the model is not sharded over all of them by FSDP2.
        ConnectionError: Nobody answers at the lighthouse's address.
    """
    if (num_ranks := dist.get_world_size(group)) > 1 and not prepared.scatter:
        raise ValueError(
            f"elastic supports replicas of one process each under DDP, but this one has {num_ranks}: start each with"
            " devices=1, num_nodes=1, without tensor parallelism, or let its ranks share one model with"
            ' LowBitFSDPStrategy(shard_size="node")'
        )
    shard_size = prepared.topology.node_size
    if prepared.scatter and shard_size != num_ranks:
        raise ValueError(
            f"elastic supports nodes that share one model by FSDP2 only, but this one has {num_ranks} ranks with"
            f' shard_size={shard_size}: give shard_size="node" without tensor parallelism, and start each node as its'
            " own run"
        )
    inside = None
    if num_ranks > 1:  # on the CPU: while the first rank waits for other replicas, the others wait for it
        members = dist.get_process_group_ranks(group)
        inside = GroupComm(new_group(members, group, "replica", timeout=_NO_TIMEOUT, backend="gloo"))
    rule = prepared.options.outer
    assert isinstance(rule, OuterRule)
    rounds = RoundsOfReplicas(rule, Membership(elastic, _facts(prepared, module), inside))
    return replace(prepared, parts=tuple(rounds if part is rule else part for part in prepared.parts))


def _facts(prepared: PreparedModel, module: nn.Module) -> dict[str, Any]:
    """The values that must be the same on all replicas."""
    settings = settings_of(prepared.options) | {"shard_size": prepared.topology.node_size}
    same = fingerprint(prepared.compressor, module, scatter=prepared.scatter, settings=settings)
    same = {name: value for name, value in same.items() if name.partition(".")[0] not in ("elastic", "memory")}
    frozen = ((name, param) for name, param in named_parameters(module) if not param.requires_grad)
    return same | {"frozen parameters": [(name, tuple(param.shape)) for name, param in frozen]}
