"""Schedules: the phase in force at every step, and phases that cannot be."""

from __future__ import annotations

import pytest

from lowbit_strategy.control import Accordion, Phase, Progress, Schedule
from lowbit_strategy.methods.loco import LoCo
from testing.controllers import matrices, run

EIGHT, FOUR = LoCo(bits=8), LoCo(bits=4)


def in_force(schedule: Schedule, progresses: list[Progress], **options: int) -> list[object]:
    decisions = run(schedule, matrices("a"), progresses, **options)
    return [schedule.levels[decision.levels["a"]] for decision in decisions]


def test_eight_bits_then_four_then_eight_for_the_last_five_percent() -> None:
    schedule = Schedule(
        [
            Phase(compressor=EIGHT),
            Phase(compressor=FOUR, start=500),
            Phase(compressor=EIGHT, start=0.95, unit="fraction"),
        ]
    )
    progresses = [Progress(step=step, num_steps=2000) for step in range(2000)]
    assert in_force(schedule, progresses) == [EIGHT] * 500 + [FOUR] * 1400 + [EIGHT] * 100


def test_epochs_need_no_step_counts() -> None:
    schedule = Schedule([Phase(compressor=EIGHT, unit="epoch"), Phase(compressor=FOUR, start=2, unit="epoch")])
    progresses = [Progress(step=step, epoch=step // 3) for step in range(12)]
    assert in_force(schedule, progresses) == [EIGHT] * 6 + [FOUR] * 6


def test_epochs_beside_steps() -> None:
    schedule = Schedule([Phase(compressor=EIGHT), Phase(compressor=FOUR, start=2, unit="epoch")])
    progresses = [Progress(step=step, epoch=step // 5, steps_per_epoch=5) for step in range(20)]
    assert in_force(schedule, progresses) == [EIGHT] * 10 + [FOUR] * 10
    with pytest.raises(ValueError, match="number of steps in an epoch"):
        in_force(schedule, [Progress(step=0)])


def test_switches_are_reported_once_with_their_reason() -> None:
    schedule = Schedule([Phase(compressor=EIGHT), Phase(compressor=FOUR, start=5)])
    decisions = run(schedule, matrices("a", "b"), [Progress(step=step) for step in range(10)])
    reported = [(step, switch) for step, decision in enumerate(decisions) for switch in decision.switches]
    assert [(step, *switch) for step, switch in reported] == [
        (0, "all parameters", "start", "loco(bits=8)", "phase 1 of 2, from step 0"),
        (5, "all parameters", "loco(bits=8)", "loco(bits=4)", "phase 2 of 2, from step 5"),
    ]


def test_a_switch_names_three_parameters_at_most() -> None:
    """It is a line in a log: a model has hundreds of parameters, and the reason must not be cut off."""
    before, after = dict.fromkeys("abcde", 0), {**dict.fromkeys("abcd", 1), "e": 0}
    (switch,) = Accordion(light=EIGHT, heavy=FOUR).switches(before, after, dict.fromkeys("abcde", "calm"))
    assert tuple(switch) == ("a, b, c and 1 more", "loco(bits=8)", "loco(bits=4)", "calm")


def test_a_restart_changes_nothing() -> None:
    schedule = Schedule([Phase(compressor=EIGHT), Phase(compressor=FOUR, start=5)])
    progresses = [Progress(step=step) for step in range(10)]
    assert in_force(schedule, progresses, restart_at=7) == in_force(schedule, progresses)


def phases(*entries: tuple[object, ...]) -> list[Phase]:
    return [Phase(compressor=FOUR, start=start, unit=unit) for start, unit in entries]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "at least one phase"),
        ([(5, "step")], "must start at 0"),
        ([(0, "step"), (10, "step"), (10, "step")], "out of order"),
        ([(0, "fraction"), (1.5, "fraction")], "0 <= start"),
        ([(0.5, "step")], "whole number of steps"),
        ([(0, "week")], "unit must be"),
    ],
)
def test_bad_phases(entries: list[tuple[object, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(phases(*entries))


def test_phases_in_different_units_are_compared_when_training_starts() -> None:
    schedule = Schedule(phases((0, "step"), (500, "step"), (0.2, "fraction")))
    with pytest.raises(ValueError, match="out of order"):
        in_force(schedule, [Progress(step=0, num_steps=1000)])


def test_fractions_need_an_end() -> None:
    with pytest.raises(ValueError, match="give num_steps"):
        in_force(Schedule(phases((0, "step"), (0.5, "fraction"))), [Progress(step=0)])
