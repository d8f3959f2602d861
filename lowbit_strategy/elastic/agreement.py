"""The agreement of replicas when they meet. torchft's `Manager` votes inside a replica, and compares step numbers.

With that, one replica may commit while another does not, and two replicas with different weights after the same number
of steps continue as two runs. Here a synchronization is committed in two steps: all have received everything (they are
prepared), and all know it. If a member is lost in between, some know and some do not. So each member has a history, a
number that identifies all synchronizations committed so far, and a prepared member knows its next history. When members
meet again, the histories show who has committed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.kernels.reference.rng import hash32

NO_HISTORY = 0


@dataclass(frozen=True, slots=True)
class MemberState:
    """One member's report when members meet; integers only.

    Args:
        clock: Number of agreements so far among all members that it has met; 0: it is new.
        history: Identifies the synchronizations that it has committed.
        prepared: The next `history`, if the synchronization for which it is prepared is committed; `NO_HISTORY`: it is
            not prepared.
        digest: Digest of all that members share: anchors, outer optimizer, averaged buffers.
        steps: Optimizer steps.
        trained: Samples trained since the next fragment was last synchronized.
        due: Whether it is ready to synchronize; if not, it only joins.
        group: Digest of the members to which its residuals belong.
        position: How far the stream of samples has been used.
        is_new: Whether its buffers and frozen parameters have not been compared since it started or healed.
    """

    clock: int
    history: int
    prepared: int
    digest: int
    steps: int
    trained: int
    due: int
    group: int
    position: int
    is_new: int = 0


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of a meeting, the same on all members.

    Args:
        helper: The member whose state everyone uses.
        clock: Number of agreements, including this one.
        history: The helper's history.
        to_commit: Members that are prepared for the helper's history, and commit.
        to_heal: Members that have a different state, and get the helper's.
        diverged: The ones among them with the helper's history, but different weights.
        steps: Optimizer steps that count for all.
        position: Where the stream of samples continues.
        exchanges: Whether they synchronize now.
        weights: Each member's weight in the mean, by the samples that it has trained.
    """

    helper: int
    clock: int
    history: int
    to_commit: tuple[int, ...]
    to_heal: tuple[int, ...]
    diverged: tuple[int, ...]
    steps: int
    position: int
    exchanges: bool
    weights: tuple[float, ...]

    @property
    def history_after(self) -> int:
        """The history once this synchronization is committed; never `NO_HISTORY`."""
        return hash32(hash32(self.history) + self.clock) or 1


def gathered_states(comm: Comm, mine: MemberState) -> list[MemberState]:
    """Every rank's state."""
    numbers = torch.tensor(astuple(mine), dtype=torch.int64)
    everyone = torch.empty(comm.world_size, numbers.numel(), dtype=torch.int64)
    comm.all_gather(everyone, numbers).wait()
    return [MemberState(*row) for row in everyone.tolist()]


def merge_ranks(states: Sequence[MemberState]) -> MemberState:
    """The report of a replica, made from its ranks in order, which differ in shards and samples."""
    digests = ",".join(str(each.digest) for each in states)
    return replace(
        states[0],
        digest=int.from_bytes(hashlib.sha256(digests.encode()).digest()[:7], "big"),
        trained=sum(each.trained for each in states),
        position=max(each.position for each in states),
    )


def agree(states: Sequence[MemberState]) -> Agreement:
    """Agree on the next round, given the states of all members in the order of ranks."""
    ranks = range(len(states))
    # the last to have met others is right: those that continued without a member agreed to it. Among those, one who
    # knows
    helper = max(ranks, key=lambda rank: (states[rank].clock, states[rank].prepared == NO_HISTORY, -rank))
    right = states[helper]
    same = [rank for rank in ranks if states[rank].history == right.history]
    knows = right.history != NO_HISTORY
    to_commit = tuple(r for r in ranks if knows and r not in same and states[r].prepared == right.history)
    diverged = tuple(rank for rank in same if states[rank].digest != right.digest and states[rank].clock)
    healed = {*ranks} - {*same} - {*to_commit} | {rank for rank in same if states[rank].digest != right.digest}
    unchanged = [each for rank, each in enumerate(states) if rank not in healed]
    return Agreement(
        helper=helper,
        clock=1 + max(each.clock for each in states),
        history=right.history,
        to_commit=to_commit,
        to_heal=tuple(sorted(healed)),
        diverged=diverged,
        steps=max(each.steps for each in unchanged),
        position=max(each.position for each in unchanged),
        exchanges=any(each.due for each in states),
        weights=sample_weights([each.trained for each in states]),
    )


def sample_weights(trained: Sequence[int]) -> tuple[float, ...]:
    """Each member's weight, 1 on average; exactly 1 if all have trained the same number of samples, or none."""
    total = sum(trained)
    return tuple(each * len(trained) / total if total else 1.0 for each in trained)
