"""How many ranks there are and how they lie, as numbers: what a plan needs to know of `Ranks`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lowbit_strategy.collectives.layout import Share
from lowbit_strategy.ranks.topology import Topology

FAR_S = 5e-3  # a round trip from which on ranks are far apart: between hosts of one site it takes less than 1 ms


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranks that train a model, as one of them sees it.

    Args:
        world_size: How many there are.
        rank: Which one this is.
        share: Which part of every parameter it reduces; None: all of it, with all others.
        topology: Which ranks share a node, as far as it is known.
        far: Whether messages between peers take so long that all travel at once, with receives posted ahead.
    """

    world_size: int
    rank: int = 0
    share: Share | None = None
    topology: Topology | None = None
    far: bool = False

    @property
    def num_parts(self) -> int:
        """Ranks that together have whole parameters, next to each other; 1 where each has them."""
        return 1 if self.share is None else self.share.count

    @property
    def num_peers(self) -> int:
        """Ranks that reduce the same part, this one included."""
        return self.world_size // self.num_parts

    @property
    def has_nodes(self) -> bool:
        """Whether some ranks are known to be on another node."""
        return self.topology is not None and self.topology.num_nodes != 1

    def peers_share_leaving(self) -> float:
        """How much of what this rank sends to all its peers alike leaves the node, from 0 to 1."""
        return self._leaving(range(self.rank % self.num_parts, self.world_size, self.num_parts))

    def world_share_leaving(self) -> float:
        """The same of what it sends to all ranks."""
        return self._leaving(range(self.world_size))

    @property
    def ring_share_leaving(self) -> float:
        """The same in a ring, as the framework's own collectives: of a node's ranks one sends to the next node."""
        per_node = None if self.topology is None else self.topology.ranks_per_node
        return (1.0 / per_node if per_node else 1.0) if self.has_nodes else 0.0

    def _leaving(self, members: range) -> float:
        others = len(members) - 1
        if not others:
            return 0.0
        near = 0 if self.topology is None else num_near(members, self.topology, self.rank)
        return (others - near) / others


def num_near(members: Collection[int], topology: Topology, rank: int) -> int:
    """How many of `members` are on the node of `rank`, itself aside."""
    return sum(near in members for near in topology.neighbours(rank)) - 1
