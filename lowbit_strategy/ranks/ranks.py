"""The ranks that train a model, as seen by one of them: their nodes as numbers, determined by all ranks together before
training, and their communicators.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lowbit_strategy import leaves
from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, GroupComm, LocalComm, gathered
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.collectives.ordered import Gathering
from lowbit_strategy.inform import listed
from lowbit_strategy.ranks.groups import connected, new_group, timeout_of

ShardSize = int | Literal["node"]

FAR_LINKS = "lowbit_strategy.far_links"  # the transport of ranks that are far apart


class NodeCoding(Protocol):
    """How a node's ranks code the gradients that they send each other, instead of sending exact ones."""

    @property
    def label(self) -> str:
        """A few words for reports."""

    def codec(self, *, exact: bool) -> Codec:
        """The codec for a parameter. `exact`: its gradients travel between nodes uncompressed."""

    def means(self, state: Any, comm: Comm, device: torch.device) -> Any:
        """Create the object that computes means over the ranks of `comm` (`engine.node_means.NodeMeans`).

        Args:
            state: The parameters' methods (`MethodState`).
            comm: The ranks of the node.
            device: Device of the gradients.
        """


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that train a model, as numbers.

    Args:
        world_size: Number of ranks.
        node_sizes: Ranks on each node, in rank order. Empty: a node's ranks are not consecutive. None: unknown, which
            counts as one node.
        rank: This rank.
        node_size: Number of consecutive ranks of a node that each reduce a part of every parameter. None: every rank
            reduces whole parameters with all others.
        far: Whether latency between peers is so high that all messages are sent at once, with receives posted ahead.
            None: it is measured when groups are made.
        coding: How a node's ranks code messages to each other. None: their sums are exact.
    """

    world_size: int
    node_sizes: tuple[int, ...] | None = None
    rank: int = 0
    node_size: int | None = None
    far: bool | None = False
    coding: NodeCoding | None = None

    @property
    def num_nodes(self) -> int:
        """The number of nodes; 0 if a node's ranks are not consecutive."""
        return 1 if self.node_sizes is None else len(self.node_sizes)

    @property
    def ranks_per_node(self) -> int | None:
        """The number of ranks per node; None if nodes differ."""
        sizes = self.node_sizes
        return sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else None

    @property
    def obstacle(self) -> str | None:
        """Why the ranks cannot have two levels; None if they can, or if nodes are unknown."""
        if self.node_sizes is None:
            return None
        if not self.node_sizes:
            return "ranks of one node are not consecutive"
        if len(self.node_sizes) == 1:
            return "all ranks are on one node"
        if self.ranks_per_node is None:
            return f"nodes have different numbers of ranks ({listed(self.node_sizes, 8)})"
        if self.ranks_per_node == 1:
            return "every node has one rank"
        return None

    @property
    def num_parts(self) -> int:
        """The number of ranks that together reduce whole parameters."""
        return self.node_size or 1

    @property
    def num_peers(self) -> int:
        """The number of ranks that reduce the same part, including this one."""
        return self.world_size // (self.node_size or 1)

    @property
    def label(self) -> str:
        """Describes which ranks reduce together, for reports."""
        if self.node_size is None:
            return f"{self.num_peers} ranks"
        inside = "exact" if self.coding is None else self.coding.label
        return f"{self.num_peers} groups of {self.num_parts} ranks, {inside} inside a group"

    def own_parts(self, specs: Iterable[TensorSpec], *, sharded: bool) -> list[TensorSpec]:
        """The parts of parameters that this rank reduces. `sharded`: FSDP2 shards them over all ranks."""
        size = self.node_size
        specs = [replace(spec, sharded=sharded) for spec in specs]
        return specs if size is None else [spec.part_for(self.rank % size, size, self.num_peers) for spec in specs]

    def num_near(self, members: Collection[int], rank: int) -> int:
        """The number of other `members` on the node of `rank`."""
        start = 0
        for size in self.node_sizes or ():
            if rank < start + size:
                return len(set(range(start, start + size)).intersection(members)) - 1
            start += size
        return 0


def find_topology(group: dist.ProcessGroup | None = None) -> Topology:
    """Find the topology of a process group, the same on all its ranks. Call it on all of them.

    1. if a launcher (torchrun, Accelerate) has set LOCAL_WORLD_SIZE on every rank, ranks 0 to LOCAL_WORLD_SIZE - 1 of
       the world are the first node, and so on
    2. otherwise ranks with one host name share a node

    Raises:
        RuntimeError: On every rank, if LOCAL_WORLD_SIZE is set on some ranks only, or differs within a node.
    """
    world_size = dist.get_world_size(group)
    everyone = gathered((os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname()), group)
    declared, names = zip(*everyone, strict=True)
    whole_world = world_size == dist.get_world_size()
    if declared.count(None) < world_size and whole_world:
        return Topology(world_size, _declared_sizes(declared))
    if declared[0] is not None and len(set(declared)) == 1:  # a part of the world, with equal nodes
        global_ranks = dist.get_process_group_ranks(group)
        names = tuple(str(rank // int(declared[0])) for rank in global_ranks)
    hosts = [(host, len(list(same))) for host, same in itertools.groupby(names)]
    consecutive = len({host for host, _ in hosts}) == len(hosts)
    return Topology(world_size, tuple(length for _, length in hosts) if consecutive else ())


def _declared_sizes(declared: Sequence[str | None]) -> tuple[int, ...]:
    sizes: list[int] = []
    at = 0
    while at < len(declared):
        text = declared[at]
        size = int(text) if text is not None and text.isdigit() else 0
        same = declared[at : at + size].count(text)
        if size < 1 or same < size:
            end = min(at + size, len(declared))
            other = next((rank for rank in range(at, end) if declared[rank] != text), at)
            raise RuntimeError(
                f"ranks disagree about the topology: rank {at} has LOCAL_WORLD_SIZE={text} and rank {other} has"
                f" LOCAL_WORLD_SIZE={declared[other]}, with {len(declared)} ranks in all. Launch all ranks in the same"
                " way, so that the ranks of a node are consecutive and know their number; or unset the variable on all"
                " of them, so that host names are compared"
            )
        sizes.append(size)
        at += size
    return tuple(sizes)


def resolve_shard_size(shard_size: ShardSize, topology: Topology, num_parts: int = 1) -> int:
    """The number of ranks that shard one model, or each of its tensor-parallel parts.

    Raises:
        ValueError: On every rank, if the number of ranks of all parts does not divide that of every node, or it is
            "node" and nodes differ.
    """
    parts = "" if num_parts == 1 else f" for each of {num_parts} tensor-parallel ranks"
    if shard_size == "node":
        if topology.ranks_per_node is None:
            raise ValueError(
                'shard_size="node" needs the same number of consecutive ranks on every node, but'
                f" {topology.obstacle}: give a number that divides the ranks of all nodes"
            )
        size = max(1, topology.ranks_per_node // num_parts)
    else:
        size = shard_size
    if not topology.node_sizes or any(each % (size * num_parts) for each in topology.node_sizes):
        sizes = listed(topology.node_sizes or (), 8) or "ranks that are not consecutive"
        raise ValueError(
            f"shard_size={size}{parts} does not divide the ranks of a node ({sizes}): a model would be sharded over the"
            ' links between nodes. Give a number that does, or "node"'
        )
    return size


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
        own += [
            new_group([members[each] for each in near], group, purpose, timeout=timeout)
            for near, purpose in ((node, "node"), (others, "peers"))
        ]
        for made in own[-2:]:
            connected(made, device)
        intra_node = _comm(own[-2], node, topology, rank)
        peers = _comm(own[-1], others, topology, rank, far=far)
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
