"""A model as one of the replicas that join and leave."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from lowbit_strategy.attach.prepare import PreparedModel, settings_of
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.elastic.membership import Membership
from lowbit_strategy.elastic.options import Elastic
from lowbit_strategy.elastic.outer import ElasticOuterSync
from lowbit_strategy.local_steps.rule import OuterRule
from lowbit_strategy.model.parameters import fingerprint, named_parameters, to_plain
from lowbit_strategy.ranks.groups import new_group

_NO_TIMEOUT = timedelta(days=30)


def register(
    elastic: Elastic, prepared: PreparedModel, module: nn.Module, group: dist.ProcessGroup | None
) -> Callable[..., Any]:
    """Registers this replica, which meets the others in `Session.resume`; call on all of its ranks. Returns what makes
    its local steps.

    Args:
        elastic: The user's choice.
        prepared: Compressor and options are the same on all replicas.
        module: The model.
        group: The ranks of this replica.

    Raises:
        ValueError: There are several ranks, and the model is not sharded over them.
        ConnectionError: Nobody answers at the lighthouse's address.
    """
    options, rule = prepared.options, cast("OuterRule", prepared.options.outer)
    if (num_ranks := dist.get_world_size(group)) > 1 and not prepared.scatter:
        raise ValueError(
            f"elastic serves replicas of one process each under DDP, and this one has {num_ranks}: start each with"
            ' devices=1, num_nodes=1, or let its ranks share one model with LowBitFSDPStrategy(shard_size="node")'
        )
    if prepared.scatter and prepared.shard_size != num_ranks:
        raise ValueError(
            f"elastic serves nodes that share one model, and this one has {num_ranks} ranks with"
            f' shard_size={prepared.shard_size}: give shard_size="node", and start each node as its own run'
        )
    settings = settings_of(options) | {"shard_size": prepared.shard_size}
    same = fingerprint(prepared.compressor, module, scatter=prepared.scatter, settings=settings)
    same |= to_plain("outer", options.outer)
    for own in ("elastic", "memory"):
        same.pop(own, None)
    frozen = ((name, param) for name, param in named_parameters(module) if not param.requires_grad)
    same["frozen parameters"] = [(name, tuple(param.shape)) for name, param in frozen]
    inside = None
    if num_ranks > 1:  # on the CPU: while the first rank waits for other replicas, the others wait for it
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        inside = GroupComm(new_group(members, group, "replica", timeout=_NO_TIMEOUT, backend="gloo"))
    make_outer = partial(ElasticOuterSync, membership=Membership(elastic, same, inside))
    return partial(rule.attach, make_outer=make_outer)
