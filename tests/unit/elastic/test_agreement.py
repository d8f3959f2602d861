"""What members agree on when they meet, whoever has learned what of the turn before."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from lowbit_strategy.elastic.agreement import NO_HISTORY, MemberState, agree, merge_ranks, sample_weights

SETTLED = MemberState(
    clock=5, history=77, prepared=NO_HISTORY, digest=1, steps=20, trained=8, due=1, group=3, position=96
)
NEW = MemberState(
    clock=0, history=NO_HISTORY, prepared=NO_HISTORY, digest=9, steps=0, trained=0, due=0, group=0, position=0
)
AFTER = agree([replace(SETTLED, clock=SETTLED.clock - 1)]).history_after
PREPARED = replace(SETTLED, prepared=AFTER)
COMMITTED = replace(SETTLED, history=AFTER, digest=2)


def test_nothing_to_do_for_those_who_agree() -> None:
    agreement = agree([SETTLED, SETTLED])
    assert (agreement.to_heal, agreement.to_commit, agreement.clock) == ((), (), 6)
    assert agreement.exchanges


def test_at_the_start_all_go_on_from_the_first_and_nothing_is_exchanged() -> None:
    agreement = agree([replace(NEW, digest=3), NEW, replace(NEW, digest=3)])
    assert (agreement.helper, agreement.to_heal, agreement.diverged, agreement.exchanges) == (0, (1,), (), False)


def test_one_who_is_new_gets_the_state_of_one_who_is_not() -> None:
    agreement = agree([NEW, SETTLED, SETTLED])
    assert (agreement.helper, agreement.to_heal, agreement.steps, agreement.position) == (1, (0,), 20, 96)


def test_those_who_are_prepared_learn_that_the_turn_counts() -> None:
    agreement = agree([PREPARED, COMMITTED, PREPARED])
    assert (agreement.helper, agreement.to_commit, agreement.to_heal) == (1, (0, 2), ())


def test_a_turn_that_nobody_has_committed_does_not_count() -> None:
    agreement = agree([PREPARED, SETTLED, PREPARED])
    assert (agreement.to_commit, agreement.to_heal, agreement.history) == ((), (), SETTLED.history)


def test_one_who_has_committed_what_the_others_gave_up_gets_their_state() -> None:
    """It was cut off; the others have met since without it and agreed to repeat the turn."""
    agreement = agree([replace(SETTLED, clock=6), COMMITTED, PREPARED])
    assert (agreement.helper, agreement.to_heal, agreement.to_commit) == (0, (1,), ())


def test_a_replica_of_several_ranks_is_one_with_the_samples_of_all() -> None:
    ranks = [replace(SETTLED, digest=1, trained=3, position=90), replace(SETTLED, digest=2, trained=5, position=96)]
    mine = merge_ranks(ranks)
    assert (mine.trained, mine.position, mine.clock, mine.history) == (8, 96, SETTLED.clock, SETTLED.history)
    assert mine == merge_ranks(ranks)
    for other in ([ranks[1], ranks[0]], [ranks[0], replace(ranks[1], digest=3)]):
        assert mine.digest != merge_ranks(other).digest


def test_other_anchors_after_the_same_turns_are_noticed() -> None:
    agreement = agree([SETTLED, replace(SETTLED, digest=5)])
    assert (agreement.to_heal, agreement.diverged) == ((1,), (1,))


@pytest.mark.parametrize("trained", [(8, 8, 8), (0, 0), (3, 5, 0)])
def test_weights_are_one_on_average(trained: tuple[int, ...]) -> None:
    weights = sample_weights(trained)
    assert sum(weights) == pytest.approx(len(trained))
    if len(set(trained)) == 1:
        assert set(weights) == {1.0}


class _Member:
    """One replica of a run in which messages are lost at random: numbers only, no weights."""

    def __init__(self) -> None:
        self.clock = self.history = self.prepared = 0
        self.alive = True

    @property
    def state(self) -> MemberState:
        return replace(NEW, clock=self.clock, history=self.history, prepared=self.prepared, digest=self.history, due=1)


@pytest.mark.parametrize("seed", range(60))
def test_histories_never_part(seed: int) -> None:
    """Members are lost, cut off and started again at random moments. One of the last meeting is in the next one."""
    chance = random.Random(seed)
    members = [_Member() for _ in range(4)]
    committed: dict[int, int] = {}  # turns that somebody has committed: by the clock of their meeting
    for _ in range(60):
        members = [_Member() if chance.random() < 0.1 else member for member in members]
        latest = max(member.clock for member in members)  # others may have taken what they knew with them
        chosen = [member for member in members if chance.random() < 0.8]
        if not any(member.clock == latest for member in chosen):
            continue
        agreement = agree([member.state for member in chosen])
        for member in chosen:
            if member.clock == latest and member.history == committed.get(latest):
                assert agreement.history == member.history  # nothing that was committed is undone
        everybody = True
        for rank, member in enumerate(chosen):
            if chance.random() < 0.1:  # the connection breaks before it knows of the others
                everybody = False
                continue
            if rank in agreement.to_commit:
                member.history = member.prepared
            elif rank in agreement.to_heal:
                member.history = agreement.history
            assert member.history == agreement.history
            member.prepared, member.clock = NO_HISTORY, agreement.clock
        if not everybody or agreement.to_commit or agreement.to_heal:
            continue
        prepared = [member for member in chosen if chance.random() < 0.9]
        for member in prepared:
            member.prepared = agreement.history_after
        if len(prepared) == len(chosen):
            for member in chosen:
                if chance.random() < 0.6:  # the others do not learn that all were prepared
                    member.history, member.prepared = member.prepared, NO_HISTORY
                    committed[agreement.clock] = member.history
    assert committed
