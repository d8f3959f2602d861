"""The process groups of two levels of ranks: those that together have whole parameters, those with the same part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lowbit_strategy.collectives.comm import Comm, GroupComm
from lowbit_strategy.collectives.layout import Share
from lowbit_strategy.model.topology import Topology


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Who exchanges what with whom.

    Args:
        comm: Ranks that reduce the same part of every parameter: compressed.
        everyone: All ranks; nothing else may use it while buckets are under way on CPU.
        inside: Ranks that together have all parts, on one node: exact. None: there is one level.
        share: Which part this rank reduces; None: all.
        own: Groups that were made for this alone.
    """

    comm: Comm
    everyone: Comm
    inside: Comm | None = None
    share: Share | None = None
    own: tuple[dist.ProcessGroup, ...] = ()

    def destroy(self) -> None:
        """The groups that were made for this alone."""
        for group in self.own:
            with contextlib.suppress(ValueError):  # the framework has destroyed all groups already
                dist.destroy_process_group(group)
        nobody: Any = dist.GroupMember.NON_GROUP_MEMBER
        for comm in (self.comm, self.everyone, self.inside):
            if comm is not None and comm.group in self.own:
                comm.group = nobody  # the last reference to a group holds its threads


def group_ranks(
    group: dist.ProcessGroup | None,
    topology: Topology,
    size: int | None,
    device: torch.device,
    *,
    scatter: bool,
    apart: bool = False,
) -> RankGroups:
    """Groups of `size` consecutive ranks inside, groups of equal index between them; call on all ranks.

    Args:
        group: All ranks.
        topology: Their nodes.
        size: Ranks that together have a whole parameter; None: every rank reduces whole parameters with all others.
        device: Of gradients.
        scatter: Parameters are sharded over all ranks: this rank reduces the shards of all that have its index.
        apart: Make a group of all ranks, too, because another thread uses `group`.
    """
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    rank, timeout = dist.get_rank(group), timeout_of(group, device)
    own = [_connected(dist.new_group(ranks, timeout=timeout), device)] if apart else []
    everyone = _comm(own[0] if apart else group, range(len(ranks)), topology, rank)
    if size is None:
        return RankGroups(everyone, everyone, own=tuple(own))
    blocks = [ranks[at : at + size] for at in range(0, len(ranks), size)]
    inside, _ = dist.new_subgroups_by_enumeration(blocks, timeout=timeout)
    between, _ = dist.new_subgroups_by_enumeration([list(same) for same in zip(*blocks, strict=True)], timeout=timeout)
    assert inside is not None
    assert between is not None
    for made in (inside, between):
        _connected(made, device)
    index = rank % size
    return RankGroups(
        comm=_comm(between, range(index, len(ranks), size), topology, rank),
        everyone=everyone,
        inside=_comm(inside, range(rank - index, rank - index + size), topology, rank),
        share=share_of(index, size, len(ranks), scatter=scatter),
        own=(*own, inside, between),
    )


def share_of(index: int, size: int, world_size: int, *, scatter: bool) -> Share:
    """What number `index` of `size` ranks inside reduces; `scatter` as in `group_ranks`."""
    return Share(index, size, world_size // size if scatter else None)


def _connected(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """Wait until all ranks are in it, which gloo does not: a rank that leaves at once, because of an error in what
    follows, would break the others' connecting, and their error would hide its own.
    """
    if device.type == "cpu":
        dist.barrier(group)
    return group


def _comm(group: dist.ProcessGroup | None, members: Iterable[int], topology: Topology, rank: int) -> GroupComm:
    comm = GroupComm(group)
    comm.num_near = num_near(members, topology, rank)
    return comm


def num_near(members: Iterable[int], topology: Topology, rank: int) -> int:
    """How many of `members` are on the node of `rank`, itself aside."""
    near = topology.neighbours(rank)
    return sum(member in near for member in members) - 1


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """How patient a group is; None if its backend does not say."""
    backend = (group if group is not None else dist.distributed_c10d._get_default_group())._get_backend(device)
    timeout: timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout
