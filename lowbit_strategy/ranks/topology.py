"""Which ranks share a node, and how far apart nodes are: found once, before training, by all ranks together."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowbit_strategy.collectives.comm import gathered
from lowbit_strategy.collectives.layout import TensorSpec

ShardSize = int | Literal["node"]

FAR_S = 5e-3  # shortest round trip of ranks that are far apart: between hosts of one site it is below 1 ms
_TRIES = 5  # of each measurement
_TIMES = 2  # measured before ranks count as far apart: a machine may be busy for a while


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks that train a model, as numbers.

    Args:
        world_size: All of them.
        node_sizes: Ranks on each node, in rank order. Empty: the ranks of a node do not follow each other. None: not
            known, which counts as one node.
        rank: The one that sees them.
        node_size: Consecutive ranks, of a node, that together reduce whole parameters, each a part. None: each reduces
            them with all others.
        far: Whether latency between peers is so high that all messages travel at once, with receives posted ahead.
        intra: Bits of the codes that these ranks of a node send each other. None: their sums are exact.
    """

    world_size: int
    node_sizes: tuple[int, ...] | None = None
    rank: int = 0
    node_size: int | None = None
    far: bool = False
    intra: int | None = None

    @property
    def num_nodes(self) -> int:
        """0 if the ranks of a node do not follow each other."""
        return 1 if self.node_sizes is None else len(self.node_sizes)

    @property
    def ranks_per_node(self) -> int | None:
        """The same on all nodes; None if it is not."""
        sizes = self.node_sizes
        return sizes[0] if sizes and sizes.count(sizes[0]) == len(sizes) else None

    @property
    def obstacle(self) -> str | None:
        """Why the ranks cannot have two levels; None if they can, or nodes are not known."""
        if self.node_sizes is None:
            return None
        if not self.node_sizes:
            return "ranks of one node do not follow each other"
        if len(self.node_sizes) == 1:
            return "all ranks are on one node"
        if self.ranks_per_node is None:
            return f"nodes have different numbers of ranks ({_runs(self.node_sizes)})"
        if self.ranks_per_node == 1:
            return "every node has one rank"
        return None

    @property
    def num_parts(self) -> int:
        """Ranks that together reduce whole parameters."""
        return self.node_size or 1

    @property
    def num_peers(self) -> int:
        """Ranks that reduce the same part, including this one."""
        return self.world_size // (self.node_size or 1)

    def own_parts(self, specs: Iterable[TensorSpec], *, sharded: bool) -> list[TensorSpec]:
        """What this rank reduces of parameters; `sharded`: FSDP2 shards them over all ranks."""
        size = self.node_size
        specs = [replace(spec, sharded=sharded) for spec in specs]
        return specs if size is None else [spec.part_for(self.rank % size, size, self.num_peers) for spec in specs]

    def num_near(self, members: Collection[int], rank: int) -> int:
        """How many other `members` are on the node of `rank`."""
        start = 0
        for size in self.node_sizes or ():
            if rank < start + size:
                return len(set(range(start, start + size)).intersection(members)) - 1
            start += size
        return 0

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes, or the ranks of a node do not follow each other."""
        return self.num_nodes != 1

    def peers_internode_fraction(self) -> float:
        """Fraction of what this rank sends to all of its peers equally that leaves the node."""
        return self._leaving(range(self.rank % self.num_parts, self.world_size, self.num_parts))

    def world_internode_fraction(self) -> float:
        """The same for all ranks."""
        return self._leaving(range(self.world_size))

    @property
    def ring_internode_fraction(self) -> float:
        """The same in a ring, as in the framework's collectives: one of a node's ranks sends to the next node."""
        return 1.0 / (self.ranks_per_node or 1) if self.has_nodes else 0.0

    def _leaving(self, members: range) -> float:
        others = len(members) - 1
        return (others - self.num_near(members, self.rank)) / others if others else 0.0


def _runs(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (" ..." if len(sizes) > 8 else "")


def find_topology(group: dist.ProcessGroup | None = None) -> Topology:
    """The topology of a process group, the same on all its ranks; call on all of them.

    1. a launcher has set LOCAL_WORLD_SIZE on every rank (torchrun, Accelerate): ranks 0 to LOCAL_WORLD_SIZE - 1 are the
       first node, and so on
    2. otherwise ranks with one host name share a node

    Raises:
        RuntimeError: On every rank, if LOCAL_WORLD_SIZE is set on some ranks only, or not the same on all of a node.
    """
    world_size = dist.get_world_size(group)
    everyone = gathered((os.environ.get("LOCAL_WORLD_SIZE"), socket.gethostname()), group)
    declared, names = zip(*everyone, strict=True)
    whole_world = world_size == dist.get_world_size()
    if declared.count(None) < world_size and whole_world:
        return Topology(world_size, _declared_sizes(declared))
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
                f" LOCAL_WORLD_SIZE={declared[other]}, with {len(declared)} ranks in all. Launch all in one way,"
                " so that the ranks of a node follow each other and all know how many they are; or unset the variable"
                " on all of them, and host names are compared"
            )
        sizes.append(size)
        at += size
    return tuple(sizes)


def resolve_shard_size(shard_size: ShardSize, topology: Topology) -> int:
    """How many ranks shard one model.

    Raises:
        ValueError: On every rank, if it does not divide the ranks of every node, or is "node" and nodes differ.
    """
    if shard_size == "node":
        if topology.ranks_per_node is None:
            raise ValueError(
                'shard_size="node" needs as many ranks on every node, consecutive ones, but'
                f" {topology.obstacle}: give a number that divides the ranks of all nodes"
            )
        return topology.ranks_per_node
    if not topology.node_sizes or any(size % shard_size for size in topology.node_sizes):
        sizes = _runs(topology.node_sizes or ()) or "ranks that do not follow each other"
        raise ValueError(
            f"shard_size={shard_size} does not divide the ranks of a node ({sizes}): a model would be sharded over the"
            ' links between nodes. Give a number that does, or "node"'
        )
    return shard_size


def hybrid_mesh(device_type: str, world_size: int, shard_size: int) -> DeviceMesh:
    """Dims ``replicate``, ``data_parallel`` (the ranks that shard a model) and ``tensor_parallel`` (1)."""
    shape = (world_size // shard_size, shard_size, 1)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "data_parallel", "tensor_parallel"))


def is_far(group: dist.ProcessGroup | None) -> bool:
    """Whether a round trip takes at least `FAR_S`; call on all ranks, which get the same answer.

    With several sites every rank is far from some other, so all wait for a long round trip. The fastest of several
    tries on the fastest rank counts: a busy host is not far. Ranks that share a network's interfaces never are.
    """
    if len(set(gathered(_network(), group))) == 1:
        return False
    return all(_round_trip_s(group) >= FAR_S for _ in range(_TIMES))


def _network() -> str:
    """The host and, if the system has them, the network namespace of this process."""
    namespace = Path("/proc/self/ns/net")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else ''}"


def _round_trip_s(group: dist.ProcessGroup | None) -> float:
    """The shortest one, the same on all ranks."""
    world_size = dist.get_world_size(group)
    shortest = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        _exchange(torch.zeros(world_size, dtype=torch.float64), group)
        shortest = min(shortest, time.perf_counter() - start)
    return float(_exchange(torch.full((world_size,), shortest, dtype=torch.float64), group).min())


def _exchange(x_W: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """One element to each rank."""
    out_W = torch.empty_like(x_W)
    dist.all_to_all_single(out_W, x_W, group=group)
    return out_W
