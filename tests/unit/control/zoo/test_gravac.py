"""GraVAC on a model of a link: compression gains and step times are known, so is the best candidate."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lowbit_strategy.control import Decision, Energy, Progress
from lowbit_strategy.control.zoo.gravac import GraVAC
from lowbit_strategy.methods.loco import LoCo
from testing.controllers import check_stop_and_resume, matrices, run

TURN = 15 + 25  # steps: settling, window
CANDIDATES = tuple(LoCo(bits=bits) for bits in (8, 6, 4, 3, 2))
NAMES = ("a", "b")


class Link:
    """Every level has a compression gain and a step time; what ranks measure differs, the sums over ranks do not."""

    def __init__(self, compression_gains: list[float], seconds: list[float]) -> None:
        self.compression_gains = compression_gains
        self.seconds = seconds

    def __call__(self, progress: Progress, decision: Decision) -> dict[str, object]:
        energy = {
            level: {name: Energy(2.0, 3.0, 2.0 * (1 - self.compression_gain(level, progress))) for name in NAMES}
            for level in decision.probe.levels
        }
        in_force = decision.levels["a"]
        seconds = self.seconds[in_force] if decision.probe.seconds else None
        return {"energy": energy, "step_seconds": seconds}

    def compression_gain(self, level: int, progress: Progress) -> float:
        return self.compression_gains[level]


def steps(count: int) -> list[Progress]:
    return [Progress(step=step) for step in range(count)]


def chosen(controller: GraVAC, link: Link, count: int = 300, **options: int) -> list[int]:
    return [d.levels["a"] for d in run(controller, matrices(*NAMES), steps(count), measure=link, **options)]


def test_settles_on_the_best_throughput_times_gain() -> None:
    #             dense   8     6     4     3     2
    link = Link([1.0, 0.99, 0.98, 0.95, 0.85, 0.76], [10.0, 4.0, 3.0, 2.0, 1.9, 1.85])
    controller = GraVAC(candidates=CANDIDATES, omega=0.0)
    levels = chosen(controller, link)
    scores = [link.compression_gains[level] / link.seconds[level] for level in range(1, 6)]
    assert levels[-1] == 1 + scores.index(max(scores)) == 3
    assert levels[: 5 * TURN : TURN] == [1, 2, 3, 4, 5]  # each had its turn, from light to heavy


def test_equal_scores_end_the_search_and_the_one_that_sends_less_stays() -> None:
    link = Link([1.0, 0.99, 0.98, 0.95, 0.94, 0.93], [10.0, 4.0, 2.0, 1.92, 1.0, 0.5])
    levels = chosen(GraVAC(candidates=CANDIDATES, omega=0.05), link)
    assert levels[-1] == 3
    assert max(levels) == 3


def test_a_candidate_with_too_little_gain_is_not_sent_and_ends_the_search() -> None:
    link = Link([1.0, 0.99, 0.9, 0.6, 0.3, 0.1], [10.0, 4.0, 3.0, 1.0, 0.5, 0.1])
    levels = chosen(GraVAC(candidates=CANDIDATES, epsilon=0.75, ewma=1.0), link)
    assert levels[-1] == 2
    assert levels.count(3) == 1  # one step shows that its compression gain is too small
    assert 4 not in levels


class Residuals(Link):
    """The compression gain begins at 1 after a switch and sinks to its limit, with a time constant of 1 / limit."""

    def __call__(self, progress: Progress, decision: Decision) -> dict[str, object]:
        in_force = decision.levels["a"]
        if in_force != getattr(self, "in_force", None):
            self.in_force, self.since = in_force, progress.step
        return super().__call__(progress, decision)

    def compression_gain(self, level: int, progress: Progress) -> float:
        age = progress.step - self.since if level == self.in_force else 0
        return self.compression_gains[level] + (1 - self.compression_gains[level]) * math.exp(
            -age * self.compression_gains[level]
        )


@pytest.mark.parametrize("measure_every", [1, 4])
def test_a_candidate_is_judged_by_a_residual_of_its_own(measure_every: int) -> None:
    compression_gains, seconds = [1.0, 0.9, 0.44, 0.2], [10.0, 1.0, 0.28, 0.15]  # 1 / s: 0.9, 1.57, 1.33
    controller = GraVAC(candidates=CANDIDATES[:3], omega=0.0, epsilon=0.15, measure_every=measure_every)
    decisions = run(controller, matrices(*NAMES), steps(300), measure=Residuals(compression_gains, seconds))
    scores = decisions[-1].state["scores"]
    assert decisions[-1].levels["a"] == 2
    for level in (1, 2, 3):
        assert scores[str(level)] == pytest.approx(compression_gains[level] / seconds[level], rel=0.05)
    hasty = dataclasses.replace(controller, settle=0, window=10)
    assert chosen(hasty, Residuals(compression_gains, seconds))[-1] == 3


def test_a_candidate_that_is_found_wanting_stays_out_of_its_turn() -> None:
    link = Residuals([1.0, 0.9, 0.5, 0.1], [10.0, 1.0, 0.5, 0.1])
    levels = chosen(GraVAC(candidates=CANDIDATES[:3], omega=0.0, epsilon=0.4), link)
    first = levels.index(3)
    out = levels.index(1, first)
    assert 3 not in levels[out:]  # beside a lighter one its compression gain would look good again
    assert levels[-1] == 2


@pytest.mark.parametrize(("epsilon", "settle", "steps"), [(0.75, None, 15), (0.1, None, 30), (0.1, 4, 4)])
def test_settling_lasts_three_time_constants(epsilon: float, settle: int | None, steps: int) -> None:
    assert GraVAC(candidates=CANDIDATES, epsilon=epsilon, settle=settle).settle_steps == steps


def test_falls_back_to_dense_and_returns() -> None:
    class Varying(Link):
        def compression_gain(self, level: int, progress: Progress) -> float:
            return 0.5 if 100 <= progress.step < 150 else self.compression_gains[level]

    link = Varying([1.0, 0.99, 0.95, 0.9, 0.85, 0.8], [10.0, 4.0, 3.0, 2.5, 2.4, 2.3])
    levels = chosen(GraVAC(candidates=CANDIDATES[:2], ewma=1.0, window=10, omega=0.0), link)
    assert levels[99] == 2
    assert set(levels[103:150]) == {0}
    assert levels[-1] == 2


def test_searches_again_as_training_goes_on() -> None:
    """What was too coarse at first is good enough later, and the other way round."""

    class Drifting(Link):
        def compression_gain(self, level: int, progress: Progress) -> float:
            early = {0: 1.0, 1: 0.99, 2: 0.9, 3: 0.6}
            return early[level] if progress.step < 200 else self.compression_gains[level]

    link = Drifting([1.0, 0.99, 0.98, 0.95], [10.0, 4.0, 3.0, 1.0])
    options = {"candidates": CANDIDATES[:3], "epsilon": 0.75, "ewma": 1.0, "omega": 0.0}
    levels = chosen(GraVAC(**options, search_every=150), link, count=800)
    assert levels[199] == 2
    assert levels[400:420].count(3)  # found by the search that began after 200
    again = [step for step in range(1, 800) if levels[step] == 1 and levels[step - 1] != 1]
    assert len(again) >= 3  # each search begins with the lightest
    once = chosen(GraVAC(**options, search_every=None), link, count=800)
    assert set(once[200:]) == {2}
    assert chosen(GraVAC(**options, search_every=150), link, count=800, restart_at=230) == levels


def test_measures_only_now_and_then_if_asked() -> None:
    link = Link([1.0, 0.99, 0.98, 0.95, 0.85, 0.76], [10.0, 4.0, 3.0, 2.0, 1.9, 1.85])
    controller = GraVAC(candidates=CANDIDATES, omega=0.0, measure_every=10)
    decisions = run(controller, matrices(*NAMES), steps(300), measure=link)
    assert decisions[-1].levels["a"] == 3
    assert sum(bool(decision.probe.levels) for decision in decisions) < 40


@pytest.mark.parametrize("restart_at", [13, 60, 200])
def test_a_restart_changes_nothing(restart_at: int) -> None:
    link = Link([1.0, 0.99, 0.98, 0.95, 0.85, 0.76], [10.0, 4.0, 3.0, 2.0, 1.9, 1.85])
    controller = GraVAC(candidates=CANDIDATES)
    assert chosen(controller, link, restart_at=restart_at) == chosen(controller, link)


def test_geometric_candidates() -> None:
    betas = [level.beta for level in GraVAC.geometric(LoCo(), "beta", 0.8, 0.1, num=4)]
    assert betas == pytest.approx([0.8, 0.4, 0.2, 0.1])
    with pytest.raises(ValueError, match="has no option 'density'"):
        GraVAC.geometric(LoCo(), "density", 0.1, 0.001)
    with pytest.raises(ValueError, match="must hold"):
        GraVAC.geometric(LoCo(), "beta", 0.1, 0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"candidates": CANDIDATES[:1]}, "at least two"),
        ({"candidates": CANDIDATES[::-1]}, "must compress more"),
        ({"window": 0}, "window must be a positive integer"),
        ({"epsilon": 1.5}, "epsilon must be in"),
        ({"omega": -0.1}, "omega must be in"),
        ({"ewma": 0.0}, "ewma must be in"),
        ({"search_every": 0}, "search_every must be a positive integer or None"),
        ({"settle": -1}, "settle must be a number of steps"),
        ({"measure_every": 50}, "must not be longer than window"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraVAC(**{"candidates": CANDIDATES, **options})


@pytest.mark.parametrize(("stop", "sharded"), [(4, True), (7, False)])
def test_stop_and_resume_is_as_never_stopped(stop: int, sharded: bool) -> None:
    candidates = tuple(LoCo(bits=bits, block_size=64, reset_steps=None) for bits in (8, 4, 2))
    check_stop_and_resume(GraVAC(candidates=candidates, window=3), sharded=sharded, stop=stop)
