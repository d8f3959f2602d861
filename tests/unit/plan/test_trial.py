"""What `Auto` compares and how it decides."""

from __future__ import annotations

import pytest

from lowbit_strategy import Auto, Dense, Exact, LoCo, WeightDelta, as_compressor
from lowbit_strategy.plan.advice import Wanted, plan_for
from lowbit_strategy.plan.cluster import Cluster, Link
from lowbit_strategy.plan.cost import compute_within, step_time
from lowbit_strategy.plan.models import transformer
from lowbit_strategy.plan.trial import (
    MOST_TRIED,
    TRIED_STEPS,
    WARM_TRIED_STEPS,
    Candidate,
    Timed,
    Trial,
    candidates,
    decide,
    has_changed,
    hopeful,
)
from lowbit_strategy.plan.uncompressed import uncompressed

OWN = Timed("own", (1.0, 1.01, 0.99, 1.02, 1.0))


def test_a_trial_costs_at_most_twenty_steps() -> None:
    one_emptying = 1
    assert MOST_TRIED * (WARM_TRIED_STEPS + TRIED_STEPS) + one_emptying <= 20


def test_the_fastest_is_chosen() -> None:
    tried = [Timed("a", (0.6, 0.61, 0.6, 0.62)), Timed("b", (0.5, 0.5, 0.52, 0.51))]
    verdict = decide(OWN, tried)
    assert verdict.chosen == 1
    assert "2.00 times as fast" in verdict.reason


def test_more_steps_to_the_same_loss_are_counted() -> None:
    four, two = Timed("4 bits", (0.51, 0.51, 0.51, 0.51)), Timed("2 bits", (0.5, 0.5, 0.5, 0.5), 1.06)
    assert decide(OWN, [four, two]).chosen == 0
    assert "1.06 times the steps" in decide(OWN, [four, two]).reason
    assert decide(OWN, [Timed("2 bits", (0.95, 0.95, 0.95, 0.95), 1.06)]).chosen is None


@pytest.mark.parametrize("seconds", [(1.2, 1.2, 1.2, 1.2), (0.98, 0.98, 0.98, 0.98)])
def test_what_is_hardly_faster_is_declined(seconds: tuple[float, ...]) -> None:
    verdict = decide(OWN, [Timed("a", seconds)])
    assert verdict.chosen is None
    assert "nothing that was tried is faster" in verdict.reason


def test_noise_is_reported_and_nothing_changed() -> None:
    noisy = Timed("own", (1.0, 0.4, 2.0, 0.5, 1.5))
    verdict = decide(noisy, [Timed("a", (0.3, 0.9, 0.8, 0.9))])
    assert verdict.chosen is None
    assert "vary too much" in verdict.reason


def test_one_slow_step_is_no_noise() -> None:
    verdict = decide(Timed("own", (1.0, 1.0, 9.0, 1.0, 1.0)), [Timed("a", (0.5, 0.5, 7.0, 0.5))])
    assert verdict.chosen == 0


def test_steps_that_were_disturbed_do_not_hide_the_fastest() -> None:
    late = Timed("a", (0.5, 0.9, 0.5, 0.9))
    assert decide(OWN, [late, Timed("b", (0.8, 0.8, 0.8, 0.8))]).chosen == 0


def test_where_the_fastest_is_uncertain_another_that_is_certain_is_taken() -> None:
    uncertain = Timed("a", (0.5, 2.0, 0.5, 2.0))
    assert decide(OWN, [uncertain, Timed("b", (0.8, 0.8, 0.8, 0.8))]).chosen == 1
    assert decide(OWN, [uncertain]).chosen is None


def test_what_is_predicted_to_be_slower_is_not_tried() -> None:
    assert hopeful([0.5, 2.0, 0.4, 0.6], 1.0) == [2, 0]
    assert hopeful([1.2, 2.0], 1.0) == []
    assert decide(OWN, []).chosen is None


def test_in_four_of_five_pairs_a_step_is_to_be_faster() -> None:
    own = Timed("own", (1.0, 1.1, 1.2, 1.3, 1.4))
    assert Timed("a", (0.9, 0.9, 0.9, 1.25)).is_certainly_faster(own)  # 17 pairs of 20
    assert not Timed("a", (0.9, 0.9, 0.9, 1.45)).is_certainly_faster(own)  # 15
    assert not Timed("a", (0.9, 0.9, 0.9, 1.25), steps=1.3).is_certainly_faster(own)


def test_in_two_of_three_where_it_was_predicted() -> None:
    own, seconds = Timed("own", (1.0, 1.1, 1.2, 1.3, 1.4)), (0.9, 0.9, 1.25, 1.35)  # 13 pairs of 20
    assert Timed("a", seconds, predicted=1.0).is_certainly_faster(own)
    assert not Timed("a", seconds, predicted=1.1).is_certainly_faster(own)
    assert not Timed("a", seconds).is_certainly_faster(own)
    assert not Timed("a", (0.9, 1.25, 1.25, 1.35), predicted=0.5).is_certainly_faster(own)  # 10


FIRST, SECOND = Candidate("first", LoCo()), Candidate("second", LoCo(bits=8), steps=1.1)


def steps_of(trial: Trial, seconds: dict[str, float]) -> list[tuple[str, int, int]]:
    """Whose steps came, how many and how many of them counted, where each takes so long."""
    came = []
    while (coming := trial.next()) is not None:
        candidate, steps, timed = coming
        came.append((candidate.name, steps, timed))
        trial.record(candidate, [seconds[candidate.name]] * timed)
    return came


def test_two_are_tried_where_the_second_may_be_sooner() -> None:
    trial = Trial(OWN, [(FIRST, 0.6), (SECOND, 0.7)])
    assert steps_of(trial, {"first": 0.6, "second": 0.5}) == [("first", 8, 6), ("second", 8, 6)]
    assert trial.tried == [FIRST, SECOND]
    assert [times.cost for times in trial.times] == pytest.approx([0.6, 0.55])
    assert [times.predicted for times in trial.times] == [0.6, 0.7]
    assert trial.more_s == 0.0


@pytest.mark.parametrize("waiting", [[(FIRST, 0.6)], [(FIRST, 0.6), (SECOND, 0.75)]])
def test_one_that_nothing_can_beat_has_all_steps(waiting: list[tuple[Candidate, float]]) -> None:
    trial = Trial(OWN, waiting)
    assert steps_of(trial, {"first": 0.6}) == [("first", 8, 6), ("first", 8, 8)]
    assert trial.tried == [FIRST]
    assert len(trial.times[0].seconds) == 14


def test_the_second_is_tried_where_the_first_disappoints() -> None:
    trial = Trial(OWN, [(FIRST, 0.6), (SECOND, 1.05)])
    assert steps_of(trial, {"first": 1.5, "second": 0.9}) == [("first", 8, 6), ("second", 8, 6)]
    assert trial.more_s == pytest.approx(6 * 0.5)


def test_nothing_to_try_is_decided_at_once() -> None:
    assert Trial(OWN, []).next() is None


def test_a_third_is_a_change() -> None:
    assert not has_changed(1.3, 1.0)
    assert not has_changed(0.8, 1.0)
    assert has_changed(1.4, 1.0)
    assert has_changed(0.7, 1.0)


def test_candidates_of_the_same_quality_have_at_least_4_bits() -> None:
    for layout in ("ddp", "fsdp", "hsdp"):
        for each in candidates(Auto(), layout, None):
            assert isinstance(each.compressor, Dense) or each.compressor == LoCo(codebook="e2m1")
            assert (each.weights is None) == (layout == "ddp")
    names = {each.name for each in candidates(Auto(quality="close"), "ddp", None)}
    assert names == {"loco4", "loco2", "bf16"}  # one bit needs too many steps without a second moment


def test_candidates_keep_what_the_user_has_chosen() -> None:
    auto = Auto(exempt=("@vector", "*.gate.*"))
    assert all(each.compressor.exempt == auto.exempt for each in candidates(auto, "fsdp", WeightDelta()))
    assert all(each.weights == WeightDelta() for each in candidates(auto, "fsdp", WeightDelta()))
    assert all(each.weights == Exact() for each in candidates(auto, "hsdp", None))


def test_by_name() -> None:
    assert as_compressor("auto") == Auto()
    assert as_compressor({"compressor": "auto", "quality": "close"}) == Auto(quality="close")
    with pytest.raises(ValueError, match="quality"):
        Auto(quality="fast")  # type: ignore[arg-type]


def test_compute_is_what_of_a_step_is_not_communication() -> None:
    wanted = Wanted(transformer(1e8), 4, 1)
    cluster = Cluster(inter_node=Link(1e-3, 1e9), intra_node=Link(1e-5, 1e10))
    plan = uncompressed(plan_for(wanted, "ddp", Dense()), 4)
    step = step_time(plan, cluster, 0.7).seconds
    assert compute_within(plan, cluster, step) == pytest.approx(0.7, rel=1e-3)
    assert compute_within(plan, cluster, 0.01) <= 0.01  # less than the communication alone takes
