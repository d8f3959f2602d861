"""The ranks between which messages are sent, and the fraction of messages that leaves the node."""

from __future__ import annotations

from lowbit_strategy.plan.messages import Level
from lowbit_strategy.ranks.topology import Topology


def peer_level(topology: Topology) -> Level:
    """The level of messages between the ranks that reduce the same part."""
    return "flat" if topology.node_size is None else "inter-node"


def peers_internode_fraction(topology: Topology) -> float:
    """The fraction that leaves the node if a rank sends equally to all its peers."""
    return _leaving(topology, range(topology.rank % topology.num_parts, topology.world_size, topology.num_parts))


def world_internode_fraction(topology: Topology) -> float:
    """The fraction that leaves the node if a rank sends equally to all ranks."""
    return _leaving(topology, range(topology.world_size))


def ring_internode_fraction(topology: Topology) -> float:
    """The same fraction in a ring, as in the framework's collectives: one rank of a node sends to the next."""
    return 0.0 if topology.num_nodes == 1 else 1.0 / (topology.ranks_per_node or 1)


def _leaving(topology: Topology, members: range) -> float:
    others = len(members) - 1
    return (others - topology.num_near(members, topology.rank)) / others if others else 0.0
