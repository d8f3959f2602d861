"""What members who meet agree on: who is right, who is new, what each counts in the mean. Pure functions of numbers.

A turn is committed in two steps, as any transaction among several: all have received everything (they are prepared),
and all know it. A member that is lost between the two leaves some who know and some who do not. So every member has a
history, a number that names all turns committed so far, and those who are prepared know which it would become. When
members meet again, whoever has committed tells the others by its history.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lowbit_strategy.kernels.reference.rng import hash32

NO_HISTORY = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What one member says when members meet; integers only.

    Args:
        clock: Agreements so far, of all members that it has met; 0: it is new.
        history: Of the turns that it has committed.
        prepared: What `history` becomes if the turn that it is prepared for was committed; `NO_HISTORY`: it is not.
        digest: Of all that members share: anchors, outer optimizer, averaged buffers.
        steps: Optimizer steps.
        trained: Samples since the last turn of the fragment that comes next.
        due: Its turn has come; otherwise it is there to join.
        group: Digest of the members among which its residuals lie.
        position: How far the stream of samples has been used.
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


@dataclass(frozen=True, slots=True)
class Agreement:
    """The same on all members.

    Args:
        helper: The member whose state is everybody's.
        clock: Agreements so far, with this one.
        history: The helper's.
        to_commit: Members that are prepared for the helper's history: they commit what they have.
        to_heal: Members that are somewhere else: they get the helper's state.
        diverged: Of those, the ones that have the helper's history, and other weights all the same.
        steps: Optimizer steps that count for all.
        position: Where the stream of samples goes on.
        exchanges: Whether a turn is taken.
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


def of_replica(standings: Sequence[Standing]) -> Standing:
    """What a replica says.

    Args:
        standings: Of its ranks, in their order, which differ in what each has of the model and of the samples.
    """
    digests = ",".join(str(each.digest) for each in standings)
    return replace(
        standings[0],
        digest=int.from_bytes(hashlib.sha256(digests.encode()).digest()[:7], "big"),
        trained=sum(each.trained for each in standings),
        position=max(each.position for each in standings),
    )


def agree(standings: Sequence[Standing]) -> Agreement:
    """Args:
    standings: Of all members, in the order of ranks.
    """
    ranks = range(len(standings))
    # whoever has met others last is right: those who went on without somebody have agreed to. Of those, one who knows
    helper = max(ranks, key=lambda rank: (standings[rank].clock, standings[rank].prepared == NO_HISTORY, -rank))
    right = standings[helper]
    to_commit = tuple(
        rank
        for rank in ranks
        if standings[rank].prepared not in (NO_HISTORY, standings[rank].history)
        and standings[rank].prepared == right.history
    )
    same = [rank for rank in ranks if standings[rank].history == right.history]
    diverged = tuple(rank for rank in same if standings[rank].digest != right.digest and standings[rank].clock)
    healed = {*ranks} - {*same} - {*to_commit} | {rank for rank in same if standings[rank].digest != right.digest}
    unchanged = [each for rank, each in enumerate(standings) if rank not in healed]
    return Agreement(
        helper=helper,
        clock=1 + max(each.clock for each in standings),
        history=right.history,
        to_commit=to_commit,
        to_heal=tuple(sorted(healed)),
        diverged=diverged,
        steps=max(each.steps for each in unchanged),
        position=max(each.position for each in unchanged),
        exchanges=any(each.due for each in standings),
    )


def history_after(history: int, clock: int) -> int:
    """What a history becomes when the turn that was agreed on as number `clock` is committed; never `NO_HISTORY`."""
    return hash32(hash32(history) + clock) or 1


def weights_of(trained: Sequence[int]) -> tuple[float, ...]:
    """What each member counts in the mean, 1 on average; exactly 1 where all have trained as much, or nobody has."""
    total = sum(trained)
    return tuple(each * len(trained) / total if total else 1.0 for each in trained)
