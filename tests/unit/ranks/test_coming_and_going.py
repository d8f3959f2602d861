"""Where the ranks of a replica that comes and goes stand among all."""

from __future__ import annotations

from dataclasses import replace

from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.simulated import SimulatedWorld


def test_ranks_of_a_replica_follow_each_other_and_reduce_with_those_of_equal_index() -> None:
    replicas, inside = SimulatedWorld(3), SimulatedWorld(2)
    found = []
    for replica in replicas.comms:
        for rank in inside.comms:
            alone = Ranks(rank, rank, intra_node=rank).coming_and_going()
            assert (alone.rank, alone.world_size, alone.alone) == (rank.rank, 2, False)
            met = replace(alone, peers=replica)
            assert (met.world_size, met.topology.num_peers, met.topology.num_parts) == (6, 3, 2)
            found.append(met.rank)
    assert found == list(range(6))
