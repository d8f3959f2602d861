"""`Ranks` as numbers, for plans."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowbit_strategy.collectives.layout import Share
from lowbit_strategy.ranks.topology import Topology


@dataclass(frozen=True, slots=True)
class Shape:
    """`Ranks` as numbers.

    Args:
        world_size: All ranks that train the model.
        rank: This one.
        share: Which part of every parameter it reduces; None: all of it, with all others.
        topology: Which ranks share a node, if known.
        far: Whether latency between peers is so high that all messages travel at once, with receives posted ahead.
    """

    world_size: int
    rank: int = 0
    share: Share | None = None
    topology: Topology | None = None
    far: bool = False

    @property
    def num_parts(self) -> int:
        """Consecutive ranks that together reduce whole parameters."""
        return 1 if self.share is None else self.share.count

    @property
    def num_peers(self) -> int:
        """Ranks that reduce the same part, including this one."""
        return self.world_size // self.num_parts

    @property
    def has_nodes(self) -> bool:
        """Whether there are several nodes, or the ranks of a node do not follow each other."""
        return self.topology is not None and self.topology.num_nodes != 1

    def peers_internode_fraction(self) -> float:
        """Fraction of what this rank sends to all of its peers equally that leaves the node."""
        return self._leaving(range(self.rank % self.num_parts, self.world_size, self.num_parts))

    def world_internode_fraction(self) -> float:
        """The same for all ranks."""
        return self._leaving(range(self.world_size))

    @property
    def ring_internode_fraction(self) -> float:
        """The same in a ring, as in the framework's collectives: one of a node's ranks sends to the next node."""
        per_node = None if self.topology is None else self.topology.ranks_per_node
        return (1.0 / per_node if per_node else 1.0) if self.has_nodes else 0.0

    def _leaving(self, members: range) -> float:
        others = len(members) - 1
        if not others:
            return 0.0
        near = 0 if self.topology is None else num_near(members, self.topology, self.rank)
        return (others - near) / others


def num_near(members: Collection[int], topology: Topology, rank: int) -> int:
    """How many other `members` are on the node of `rank`."""
    return sum(near in members for near in topology.neighbours(rank)) - 1
