"""The ranks that train a model, as numbers, which all ranks determine together before training."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, gathered
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.inform import listed

ShardSize = int | Literal["node"]


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
