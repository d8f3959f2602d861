"""ErrorBudget: the dynamic program against trying everything, and the controller around it."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from lowbit_strategy.control import Decision, EndToEnd, Energy, ErrorBudget, Progress
from lowbit_strategy.control.budget import cheapest
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.qsgd import QSGD
from testing.controllers import matrices, run

CHOICES = tuple(LoCo(bits=bits) for bits in (8, 4, 2))
ERRORS = {8: 1e-5, 4: 4e-3, 2: 0.1}  # squared, relative


@pytest.mark.parametrize("seed", range(30))
def test_dynamic_program_is_as_good_as_trying_everything(seed: int) -> None:
    rng = random.Random(seed)
    groups, options = rng.randint(1, 6), rng.randint(2, 4)
    values = [sorted((rng.random() * 100 for _ in range(options)), reverse=True) for _ in range(groups)]
    costs = [sorted(rng.random() for _ in range(options)) for _ in range(groups)]
    bound = rng.uniform(0.1, 0.7) * groups
    resolution = 5000

    def total(rows: list[list[float]], picks: tuple[int, ...]) -> float:
        return sum(row[pick] for row, pick in zip(rows, picks, strict=True))

    every = list(itertools.product(range(options), repeat=groups))
    allowed = [picks for picks in every if total(costs, picks) <= bound]
    solution = cheapest(values, costs, bound, resolution)
    assert solution.feasible == bool(allowed)
    if not allowed:
        return
    found = tuple(solution.levels)
    assert total(costs, found) <= bound
    # Rounding costs up takes at most one step a group from the bound.
    tighter = [picks for picks in allowed if total(costs, picks) <= bound * (1 - groups / resolution)]
    best_of_tighter = min((total(values, picks) for picks in tighter), default=math.inf)
    assert total(values, found) <= best_of_tighter + 1e-9 or not tighter


def test_equal_options_are_decided_the_same_way_everywhere() -> None:
    assert cheapest([[1.0, 1.0], [2.0, 2.0]], [[0.1, 0.1], [0.1, 0.1]], 1.0, 10).levels == [0, 0]


def show(weights: dict[str, float]) -> object:
    def measure(progress: Progress, decision: Decision) -> dict[str, object]:
        energy = {
            level: {
                name: Energy(weight, weight, weight * ERRORS[CHOICES[level].bits]) for name, weight in weights.items()
            }
            for level in decision.probe.levels
        }
        return {"energy": energy}

    return measure


def relative_error(levels: dict[str, int], weights: dict[str, float]) -> float:
    error = sum(weight * ERRORS[CHOICES[levels[name]].bits] for name, weight in weights.items())
    return math.sqrt(error / sum(weights.values()))


def progresses(count: int) -> list[Progress]:
    return [Progress(step=step) for step in range(count)]


def test_keeps_the_error_bound_and_spends_it_on_what_matters_little() -> None:
    weights = {"loud": 100.0, "middle": 5.0, "quiet": 0.1}
    controller = ErrorBudget(choices=CHOICES, max_error=0.1, interval=50)
    decisions = run(controller, matrices(*weights), progresses(120), measure=show(weights))
    assert decisions[0].levels == {"loud": 0, "middle": 0, "quiet": 0}
    assert decisions[1].levels == {"loud": 1, "middle": 2, "quiet": 2}
    assert relative_error(decisions[1].levels, weights) <= 0.1
    assert [step for step, decision in enumerate(decisions) if decision.probe.levels] == [0, 50, 100]


def test_keeps_the_byte_bound_and_gives_the_bits_to_what_matters() -> None:
    weights = {"loud": 100.0, "middle": 5.0, "quiet": 0.1}
    controller = ErrorBudget(choices=CHOICES, max_bits=5.0, interval=50)
    decisions = run(controller, matrices(*weights), progresses(3), measure=show(weights))
    levels = decisions[-1].levels
    assert levels == {"loud": 0, "middle": 1, "quiet": 2}
    bits = sum(CHOICES[level].bits + 16 / 128 for level in levels.values()) / 3
    assert bits <= 5.0


def test_groups_share_a_level() -> None:
    weights = {"blocks.0.a": 10.0, "blocks.1.a": 0.1, "blocks.0.b": 0.1, "blocks.1.b": 0.1}
    controller = ErrorBudget(choices=CHOICES, max_error=0.1, group_by="kind", interval=50)
    levels = run(controller, matrices(*weights), progresses(2), measure=show(weights))[-1].levels
    assert levels["blocks.0.a"] == levels["blocks.1.a"] != levels["blocks.0.b"] == levels["blocks.1.b"]


def test_exempt_parameters_count_for_nothing() -> None:
    weights = {"a": 1.0, "bias": 1e6}
    specs = [*matrices("a"), TensorSpec("bias", (64,))]
    controller = ErrorBudget(choices=CHOICES, max_error=0.09, interval=50)
    levels = run(controller, specs, progresses(2), measure=show(weights))[-1].levels
    assert levels == {"a": 1, "bias": 0}


def test_bits_count_the_uplink_alone_under_fsdp() -> None:
    """Half of what travels under DDP is an 8-bit downlink, which FSDP2 does not have."""
    choices = tuple(QSGD(bits=bits, return_bits=8) for bits in (8, 4, 2))
    controller = ErrorBudget(choices=choices, max_bits=4.2, interval=50)
    with pytest.raises(ValueError, match=r"heaviest choices need 5\.\d+ bits"):
        controller.init(matrices("a"), 4)
    state = controller.init(matrices("a"), 4, scatter=True)
    assert state["nbytes"]["a"][1] <= state["max_nbytes"] < state["nbytes"]["a"][0]


def test_impossible_bytes_are_refused_when_training_starts() -> None:
    with pytest.raises(ValueError, match=r"heaviest choices need 2\.\d+ bits per element; raise max_bits"):
        ErrorBudget(choices=CHOICES, max_bits=1.5).init(matrices("a"), 4)


def test_impossible_error_is_refused_at_the_first_solution_and_reported_later() -> None:
    controller = ErrorBudget(choices=CHOICES, max_error=1e-4, interval=50)
    with pytest.raises(ValueError, match="raise max_error or add a lighter choice"):
        run(controller, matrices("a"), progresses(2), measure=show({"a": 1.0}))
    state = dict(controller.init(matrices("a"), 4), solved=True)
    from lowbit_strategy.control import Telemetry

    energy = {level: {"a": Energy(1.0, 1.0, ERRORS[choice.bits])} for level, choice in enumerate(CHOICES)}
    decision = controller.decide(Telemetry(progress=Progress(step=51), energy=energy), state)
    assert decision.levels == {"a": 0}
    assert "cannot be met" in decision.warnings[0]


def test_a_restart_changes_nothing() -> None:
    weights = {"loud": 100.0, "middle": 5.0, "quiet": 0.1}
    controller = ErrorBudget(choices=CHOICES, max_error=0.09, interval=10)
    arguments = (controller, matrices(*weights), progresses(40))
    assert run(*arguments, measure=show(weights), restart_at=15) == run(*arguments, measure=show(weights))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either max_error or max_bits"),
        ({"max_error": 0.1, "max_bits": 4}, "either max_error or max_bits"),
        ({"max_error": 1.5}, "max_error must be between"),
        ({"max_bits": 0}, "max_bits must be positive"),
        ({"max_error": 0.1, "interval": 0}, "interval must be a positive integer"),
        ({"max_error": 0.1, "choices": CHOICES[:1]}, "at least two"),
        ({"max_error": 0.1, "choices": CHOICES[::-1]}, "must compress more"),
        ({"max_error": 0.1, "group_by": "layer"}, "group_by must be"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ErrorBudget(**{"choices": CHOICES, **options})


def test_the_error_of_both_hops_can_be_bounded() -> None:
    """The whole reduction errs by more than the uplink, so fewer parameters bear the heavier choices."""

    def measure(progress: Progress, decision: Decision) -> dict[str, object]:
        names = ("a", "b", "c")
        energy = {
            level: dict.fromkeys(names, Energy(1.0, 1.0, ERRORS[CHOICES[level].bits]))
            for level in decision.probe.levels
        }
        both = {name: EndToEnd(4 * ERRORS[CHOICES[decision.levels[name]].bits], 1.0) for name in names}
        return {"energy": energy, "end_to_end": both if decision.probe.end_to_end else {}}

    def bits(*, both_hops: bool) -> list[int]:
        budget = ErrorBudget(choices=CHOICES, max_error=0.1, interval=10, both_hops=both_hops)
        decision = run(budget, matrices("a", "b", "c"), (Progress(step=step) for step in range(12)), measure=measure)[
            -1
        ]
        return sorted(CHOICES[level].bits for level in decision.levels.values())

    assert bits(both_hops=False) == [4, 4, 4]  # 4e-3 each is below 0.1 ** 2
    assert bits(both_hops=True) == [4, 4, 8] or bits(both_hops=True) == [4, 8, 8]  # four times as much is not
    with pytest.raises(ValueError, match="both_hops says what max_error is about"):
        ErrorBudget(choices=CHOICES, max_bits=4.0, both_hops=True)
