"""The ranks that train a model, as seen by one of them, and their communicators."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lowbit_strategy import leaves
from lowbit_strategy.collectives.comm import Comm, GroupComm, LocalComm, gathered
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.ranks.groups import connected, new_group, timeout_of
from lowbit_strategy.ranks.topology import NodeCoding, Topology

FAR_LINKS = "lowbit_strategy.far_links"  # the transport of ranks that are far apart


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that train a model, as seen by one of them.

    It is made once, before training. When members change, another one is passed to `GradientSync.renew` between two
    steps, so other code reads ``sync.ranks`` whenever it needs a group. `ParameterDigest` and the `Gathering` of
    weights have their own communicators, which are then recreated.

    Args:
        everyone: All ranks that hold a part of the model along any mesh dim, for agreements between steps. Nothing
            else may use its group while buckets are in flight on CPU. With replicas that come and go: the ranks of this
            replica.
        peers: The ranks that reduce the same part of every parameter as this one, with compressed messages: with one
            level all ranks; with two levels ranks on different nodes; under HSDP those with the same shard.
        intra_node: The ranks of one node that each reduce a part of every parameter. None: there is one level.
        coding: How a node's ranks code messages to each other. None: their sums are exact.
        node_sizes: See `Topology`.
        group: A group of the ranks of `everyone` that `destroy` keeps, because a closed session still loads
            checkpoints.
        own: Groups made for this object, which `destroy` ends.
        column: The part of the model that this rank, and the ranks with which it averages gradients, have along other
            mesh dims, such as tensor parallelism.
        comes_and_goes: Whether `everyone` is one of several replicas that come and go, of which `peers` has one rank
            each.
    """

    everyone: Comm
    peers: Comm
    intra_node: Comm | None = None
    node_sizes: tuple[int, ...] | None = None
    group: dist.ProcessGroup | None = None
    own: tuple[dist.ProcessGroup, ...] = ()
    comes_and_goes: bool = False
    coding: NodeCoding | None = None
    column: int = 0

    @property
    def rank(self) -> int:
        """Index of this rank among those that average gradients, replica by replica."""
        inside = self.intra_node
        return self.peers.rank if inside is None else self.peers.rank * inside.world_size + inside.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that average gradients."""
        return self.peers.world_size * (1 if self.intra_node is None else self.intra_node.world_size)

    @property
    def topology(self) -> Topology:
        """These ranks as numbers."""
        node_size = None if self.intra_node is None else self.intra_node.world_size
        return Topology(self.world_size, self.node_sizes, self.rank, node_size, self.peers.is_far, self.coding)

    @property
    def alone(self) -> bool:
        """Whether nothing is compressed, because no other rank ever reduces the same parts."""
        return self.peers.world_size == 1 and not self.comes_and_goes

    @property
    def logs(self) -> bool:
        """Whether this rank logs messages that apply to all ranks."""
        return self.rank == 0 and self.everyone.rank == 0

    @classmethod
    def flat(cls, comm: Comm) -> Ranks:
        """Ranks with one level: all ranks of `comm` reduce whole parameters with each other."""
        return cls(comm, comm, group=comm.group)

    def coming_and_going(self) -> Ranks:
        """These ranks as a replica that has not met other replicas yet."""
        return replace(self, peers=LocalComm(), node_sizes=None, comes_and_goes=True)

    def gathering(self, *, sharded_inside: bool) -> Gathering:
        """The gathering of weights, with its own byte counter. It sends to each other node only once.

        Args:
            sharded_inside: Whether the ranks of a node shard one model (HSDP); if not, all ranks do.
        """
        if self.intra_node is None:
            return Gathering(self.peers.with_own_counter())
        inside = self.intra_node.with_own_counter()
        return Gathering(inside) if sharded_inside else Gathering(self.peers.with_own_counter(), inside)

    def destroy(self) -> None:
        """End the groups that were made for this object."""
        for group in self.own:
            with contextlib.suppress(ValueError):  # the framework has destroyed all groups already
                dist.destroy_process_group(group)
        for comm in (self.everyone, self.peers, self.intra_node):
            if comm is not None:
                comm.release(self.own)


def make_ranks(
    group: dist.ProcessGroup | None,
    topology: Topology,
    device: torch.device,
    *,
    everyone: dist.ProcessGroup | None = None,
    own_world: bool = False,
) -> Ranks:
    """Make groups of ranks that together reduce whole parameters, and groups of ranks that reduce the same part. Call
    it on all ranks of `group`.

    Args:
        group: The ranks that average gradients.
        topology: The same ranks as numbers.
        device: Device of the gradients.
        everyone: All ranks that hold a part of the model, if there are more.
        own_world: Whether to also make a new group of the ranks of `group`, because another thread uses `group`.
    """
    size = topology.node_size
    members = dist.get_process_group_ranks(group)
    rank, backend = dist.get_rank(group), (group or c10d._get_default_group())._get_backend(device)
    timeout = timeout_of(group, device)
    far = topology.far if device.type == "cpu" and backend.name() == "gloo" and len(members) > 1 else False
    if far is None:
        far = topology.num_nodes != 1 and leaves.load(f"{FAR_LINKS}.distance:is_far", "far_links")(group)
    far_world = far and size is None
    own_world |= far_world
    own = [connected(new_group(members, group, "world", timeout=timeout), device)] if own_world else []
    world = _comm(own[0] if own_world else group, range(len(members)), topology, rank, far=far_world)
    if device.type != "cpu":
        connected(group, device)  # FSDP2 has not used it yet if the model is on the meta device
    everybody, everyones, column = world, group, 0
    if dist.get_world_size(everyone) > len(members):
        everybody, everyones = GroupComm(everyone), everyone
        column = sorted(set(gathered(members[0], everyone))).index(members[0])
    peers, intra_node = world, None
    if size is not None:
        index = rank % size
        node, others = range(rank - index, rank - index + size), range(index, len(members), size)
        node_group = new_group([members[each] for each in node], group, "node", timeout=timeout)
        peer_group = new_group([members[each] for each in others], group, "peers", timeout=timeout)
        own += [connected(node_group, device), connected(peer_group, device)]
        intra_node = _comm(node_group, node, topology, rank)
        peers = _comm(peer_group, others, topology, rank, far=far)
    return Ranks(
        everyone=everybody,
        peers=peers,
        intra_node=intra_node,
        node_sizes=topology.node_sizes,
        group=everyones,
        own=tuple(own),
        coding=topology.coding,
        column=column,
    )


def _comm(
    group: dist.ProcessGroup | None, members: Collection[int], topology: Topology, rank: int, *, far: bool = False
) -> GroupComm:
    comm = GroupComm(group)
    if far:
        assert group is not None
        comm = leaves.load(f"{FAR_LINKS}.far_comm:FarComm", "far_links")(group)
    comm.num_near = topology.num_near(members, rank)
    return comm
