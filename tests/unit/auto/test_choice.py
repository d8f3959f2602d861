"""What `Auto` compares and how it decides."""

from __future__ import annotations

import pytest

from lowbit_strategy import Auto, Dense, Exact, LoCo, WeightCode, WeightDelta, as_compressor
from lowbit_strategy.attach.prepare import Wrapper
from lowbit_strategy.auto.choice import MOST_TRIED_STEPS, WARM_TRIED_STEPS, candidates, has_changed, num_timed
from lowbit_strategy.auto.times import Timed, decide

OWN = Timed("own", (1.0, 1.01, 0.99, 1.02, 1.0))


@pytest.mark.parametrize("quality", ["same", "close"])
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "hsdp"])
def test_a_trial_takes_at_most_twenty_steps(wrapper: Wrapper, quality: str) -> None:
    tried = candidates(Auto(quality=quality), wrapper, None)  # type: ignore[arg-type]
    one_emptying, timed = 1, num_timed(len(tried))
    assert len(tried) * (WARM_TRIED_STEPS + timed) + one_emptying <= MOST_TRIED_STEPS == 20
    assert timed >= 4


def test_the_fastest_is_chosen() -> None:
    tried = [Timed("a", (0.6, 0.61, 0.6, 0.62)), Timed("b", (0.5, 0.5, 0.52, 0.51))]
    verdict = decide(OWN, tried)
    assert verdict.chosen == 1
    assert "2.00 times as fast" in verdict.reason


@pytest.mark.parametrize("seconds", [(1.2, 1.2, 1.2, 1.2), (0.98, 0.98, 0.98, 0.98)])
def test_what_is_hardly_faster_is_declined(seconds: tuple[float, ...]) -> None:
    verdict = decide(OWN, [Timed("a", seconds)])
    assert verdict.chosen is None
    assert "no candidate is faster" in verdict.reason


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


def test_where_nothing_fits_the_framework_stays() -> None:
    verdict = decide(OWN, [])
    assert verdict.chosen is None
    assert "no candidate fits into memory" in verdict.reason


def test_in_four_of_five_pairs_a_step_is_to_be_faster() -> None:
    own = Timed("own", (1.0, 1.1, 1.2, 1.3, 1.4))
    assert Timed("a", (0.9, 0.9, 0.9, 1.25)).is_certainly_faster(own)  # 17 pairs of 20
    assert not Timed("a", (0.9, 0.9, 0.9, 1.45)).is_certainly_faster(own)  # 15


def test_a_half_is_a_change() -> None:
    assert not has_changed(1.4, 1.0)
    assert not has_changed(0.7, 1.0)
    assert has_changed(1.6, 1.0)
    assert has_changed(0.6, 1.0)


def test_candidates_of_the_same_quality_have_at_least_4_bits() -> None:
    for layout in ("ddp", "fsdp", "hsdp"):
        for each in candidates(Auto(), layout, None):
            assert isinstance(each.compressor, Dense) or each.compressor == LoCo()
            assert (each.weights is None) == (layout == "ddp")
    names = {each.name for each in candidates(Auto(quality="close"), "ddp", None)}
    assert names == {"loco", "loco2", "bf16"}  # one bit needs too many steps without a second moment


def test_weights_are_tried_coded_and_exact() -> None:
    found = {each.name: each.weights for each in candidates(Auto(), "fsdp", None)}
    assert found == {"loco": WeightCode(), "loco, exact weights": Exact()}


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
