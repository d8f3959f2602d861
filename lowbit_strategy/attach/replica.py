"""A model as one of the replicas that join and leave."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowbit_strategy.attach.prepare import PreparedModel, settings_of
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.strategy_options import SyncOptions
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.model.parameters import canonical_name, fingerprint, to_plain
from lowbit_strategy.ranks.groups import new_group
from lowbit_strategy.ranks.membership import Membership

_NO_TIMEOUT = timedelta(days=30)


def membership_of(prepared: PreparedModel, module: nn.Module, group: dist.ProcessGroup | None) -> Membership:
    """Registers this replica, which meets the others in `Session.resume`; call on all of its ranks.

    Args:
        prepared: With ``elastic`` among the options; compressor and options are the same on all replicas.
        module: The model.
        group: The ranks of this replica.

    Raises:
        ValueError: There are several ranks, and the model is not sharded over them.
        ConnectionError: Nobody answers at the lighthouse's address.
    """
    options = prepared.options
    assert options.elastic is not None
    if (num_ranks := dist.get_world_size(group)) > 1 and not prepared.scatter:
        raise ValueError(
            f"elastic serves replicas of one process each under DDP, and this one has {num_ranks}: start each with"
            ' devices=1, num_nodes=1, or let its ranks share one model with LowBitFSDPStrategy(shard_size="node")'
        )
    settings = settings_of(options) | {"shard_size": prepared.shard_size}
    same = fingerprint(prepared.compressor, module, scatter=prepared.scatter, settings=settings)
    same |= to_plain("outer", options.outer)
    for own in ("elastic", "memory"):
        same.pop(own, None)
    frozen = ((name, param) for name, param in module.named_parameters() if not param.requires_grad)
    same["frozen parameters"] = [(canonical_name(name), tuple(param.shape)) for name, param in frozen]
    inside = None
    if num_ranks > 1:  # on the CPU: while the first rank waits for other replicas, the others wait for it
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        inside = GroupComm(new_group(members, group, "replica", timeout=_NO_TIMEOUT, backend="gloo"))
    return Membership(options.elastic, same, inside)


def join_before_forward(session: Session, module: nn.Module) -> None:
    """The replica meets the others before its first forward pass in training at the latest: afterwards, weights would
    change between a forward and its backward pass.
    """
    assert session.replica is not None

    @torch.compiler.disable
    def join(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            session.resume()

    hook = module.register_forward_pre_hook(join, prepend=True)  # before the one in which FSDP2 gathers weights
    session.replica.on_join = hook.remove


def advance_schedule(schedule: Any, num_steps: int) -> None:
    """Bring a schedule of the learning rate to where the other replicas are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer has not stepped before the schedule
        for _ in range(num_steps):
            schedule.step()


def one_replica(options: SyncOptions) -> str:
    """What is logged if there is no other replica to exchange with."""
    off = "" if options.outer is None else f", and {type(options.outer).__name__} takes no local steps"
    return (
        "lowbit_strategy: one replica: the model is sharded over all ranks, inside of which gradients are added up"
        f" exactly, so nothing is compressed{off}. Start several nodes. To try it on one, give a smaller shard_size, or"
        " start the ranks with LOCAL_WORLD_SIZE set to fewer than they are"
    )
