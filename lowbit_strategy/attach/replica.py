"""A model's place among replicas that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.handshake import facts, plain
from lowbit_strategy.ranks.membership import Membership

_PATIENCE = timedelta(days=30)


def membership_of(
    compressor: Compressor,
    options: SyncOptions,
    module: nn.Module,
    settings: Mapping[str, object],
    group: dist.ProcessGroup | None,
    *,
    scatter: bool,
) -> Membership:
    """How this replica finds the others, whom it meets in `Session.resume`; call on all of its ranks.

    Args:
        compressor: The same on all replicas.
        options: Those of the run, with ``elastic``.
        module: The model.
        settings: The options as plain values.
        group: The ranks of this replica.
        scatter: They share one model.

    Raises:
        ValueError: There are several, and each has a whole model.
        ConnectionError: Nobody answers at the lighthouse's address.
    """
    assert options.elastic is not None
    if (num_ranks := dist.get_world_size(group)) > 1 and not scatter:
        raise ValueError(
            f"elastic serves replicas of one process each under DDP, and this one has {num_ranks}: start each with"
            ' devices=1, num_nodes=1, or let its ranks share one model with LowBitFSDPStrategy(shard_size="node")'
        )
    own = {"elastic", "memory"}  # may differ between replicas
    everything = facts(compressor, module, scatter=scatter, settings=settings)
    same = {name: value for name, value in everything.items() if name not in own}
    same |= plain("outer", options.outer)
    return Membership(options.elastic, same, _agreeing(group) if num_ranks > 1 else None)


def _agreeing(group: dist.ProcessGroup | None) -> GroupComm:
    """The ranks of a replica, on the CPU: while the first one waits for other replicas, they wait for it."""
    members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return GroupComm(dist.new_group(members, timeout=_PATIENCE, backend="gloo"))


def join_before_forward(session: Session, module: nn.Module) -> None:
    """The replica meets the others before the first forward pass of training, if it has not by then.

    After it, other weights would come between the forward pass and its backward pass.
    """
    assert session.replica is not None

    @torch.compiler.disable
    def join(module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            session.resume()

    hook = module.register_forward_pre_hook(join, prepend=True)  # FSDP2 gathers weights in one of its own
    session.replica.on_join = hook.remove


def one_replica(options: SyncOptions) -> str:
    """What is logged where there is nobody to exchange with."""
    off = "" if options.outer is None else f", and {type(options.outer).__name__} takes no local steps"
    return (
        "lowbit_strategy: one replica: the model is sharded over all ranks, inside of which gradients are added up"
        f" exactly, so nothing is compressed{off}. Start several nodes. To try it on one, give a smaller shard_size, or"
        " start the ranks with LOCAL_WORLD_SIZE set to fewer than they are"
    )
