"""The driver on one rank: what controllers receive, what is applied, what is saved."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch

from lowbit_strategy.adaptation import driver as adaptive_driver
from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.control import (
    Accordion,
    AccordionBatch,
    Bounds,
    Controller,
    Decision,
    Guard,
    Phase,
    Probe,
    Progress,
    Schedule,
    Static,
    Telemetry,
)
from lowbit_strategy.engine.transactions import Transactions
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from testing.controllers import check_stop_and_resume
from testing.worlds.single import engine, gradients, reduce_step

EIGHT, FOUR, TWO = (LoCo(bits=bits, block_size=64, reset_steps=None) for bits in (8, 4, 2))
WEIGHTS = ("blocks.0.weight", "blocks.1.weight")


class Recorder(Controller):
    """Requests `probe` at every step and keeps the telemetry it receives."""

    def __init__(self, probe: Probe, read_every: int = 0) -> None:
        self.probe = probe
        self.read_every = read_every
        self.telemetry: list[Telemetry] = []

    @property
    def levels(self) -> tuple[LoCo, ...]:
        return (EIGHT, TWO)

    def init(self, specs, world_size):
        return {}

    def reads_accumulated(self, progress, state):
        return bool(self.read_every) and progress.step > 0 and progress.step % self.read_every == 0

    def decide(self, telemetry, state):
        self.telemetry.append(telemetry)
        return Decision(state=state, levels=dict.fromkeys((*WEIGHTS, "bias"), 1), probe=self.probe)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("source", ["local", "mean"])
def test_accumulated_norms(source: str, sharded: bool) -> None:
    recorder = Recorder(Probe(accumulate=source, square=True), read_every=3)
    sync = engine(Dense(), sharded=sharded)
    AdaptiveDriver(recorder, sync)
    out = [reduce_step(sync, gradients(step)) for step in range(7)]
    for first in (0, 3):
        telemetry = recorder.telemetry[first + 3].accumulated_norm
        for name in WEIGHTS:
            terms = [out[first + at][name] if source == "mean" else gradients(first + at)[name] for at in range(3)]
            assert telemetry[name] == pytest.approx(float(sum(terms).norm()), rel=1e-5)
            square = recorder.telemetry[first + 3].accumulated_square[name]
            assert square == pytest.approx(sum(float(term.square().sum()) for term in terms), rel=1e-5)
        assert recorder.telemetry[first + 3].accumulated_steps == 3
    assert (recorder.telemetry[2].accumulated_norm, recorder.telemetry[2].accumulated_steps) == ({}, 0)


@pytest.mark.parametrize(("source", "keeps_copies"), [("local", True), ("local", False), ("mean", True)])
def test_gradients_that_are_thrown_away_are_not_accumulated(source: str, keeps_copies: bool) -> None:
    """A spike is taken back, or cleared before a step of another gradient."""
    found = []
    for spike in (None, Transactions.roll_back, Transactions.set_aside):
        recorder = Recorder(Probe(accumulate=source, square=True), read_every=3)
        sync = engine(LoCo(bits=4), keeps_copies=keeps_copies)
        AdaptiveDriver(recorder, sync)
        for step in range(4):
            if step == 1 and spike is not None:
                reduce_step(sync, gradients(9, scale=1e3), end=False)
                spike(sync.transactions, list(sync.specs))
                sync.transactions.settle(list(sync.specs), used=False)
                sync._clear_step()
            reduce_step(sync, gradients(step))
        telemetry = recorder.telemetry[3]
        found.append((telemetry.accumulated_norm, telemetry.accumulated_square, telemetry.accumulated_steps))
    assert found[0][0][WEIGHTS[0]] > 0
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_gradients_that_are_cleared_and_used_are_accumulated() -> None:
    recorder = Recorder(Probe(accumulate="local"), read_every=1)
    sync = engine(LoCo(bits=4))
    AdaptiveDriver(recorder, sync)
    reduce_step(sync, gradients(0), end=False)
    sync.transactions.set_aside(list(sync.specs))
    reduce_step(sync, gradients(1), end=False)
    sync.transactions.settle(list(sync.specs), used=True)
    sync.end_step()
    sync.begin_step()
    wanted = gradients(0)[WEIGHTS[0]] + gradients(1)[WEIGHTS[0]]
    assert recorder.telemetry[1].accumulated_norm[WEIGHTS[0]] == pytest.approx(float(wanted.norm()), rel=1e-5)


def test_another_kind_of_gradient_begins_another_window() -> None:
    recorder = Recorder(Probe(accumulate="local"), read_every=3)
    sync = engine(Dense(), sharded=True)
    AdaptiveDriver(recorder, sync)
    out = []
    for step in range(4):
        if step == 2:
            recorder.probe = Probe(accumulate="mean")
        out.append(reduce_step(sync, gradients(step)))
    telemetry = recorder.telemetry[3]
    assert telemetry.accumulated_norm[WEIGHTS[0]] == pytest.approx(float(out[2][WEIGHTS[0]].norm()), rel=1e-5)
    assert telemetry.accumulated_steps == 1


def test_what_begins_with_a_sum_finds_one() -> None:
    """Also where it is only asked whether it lacks something."""
    recorder = Recorder(Probe(accumulate="local"))
    sync = engine(Dense())
    driver = AdaptiveDriver(recorder, sync)
    with mock.patch.object(Recorder, "reads_accumulated", return_value=True):
        driver.check()
        sync.begin_step()
    asked, first = recorder.telemetry
    assert asked == first
    assert asked.accumulated_norm[WEIGHTS[0]] == 0.0


def test_energies_and_time_are_those_of_the_step_before() -> None:
    ticks = iter(range(100))
    recorder = Recorder(Probe(levels=(0, 1), seconds=True))
    sync = engine(Dense())
    driver = AdaptiveDriver(recorder, sync)
    driver.timer = lambda: 0.5 * next(ticks)  # also afterwards
    for step in range(3):
        reduce_step(sync, gradients(step))
    assert (recorder.telemetry[0].energy, recorder.telemetry[0].step_seconds) == ({}, None)
    assert recorder.telemetry[1].step_seconds is None  # no step before it
    assert recorder.telemetry[2].step_seconds == 0.5
    telemetry = recorder.telemetry[1]
    for name in WEIGHTS:
        grad = gradients(0)[name]
        assert telemetry.energy[0][name].compensated == pytest.approx(float(grad.square().sum()), rel=1e-5)
        assert 0 < telemetry.energy[0][name].error < 0.01 * telemetry.energy[1][name].error
        assert telemetry.residual_norm[name] == 0
    assert recorder.telemetry[2].residual_norm[WEIGHTS[0]] > 0


@pytest.mark.parametrize("sharded", [False, True])
def test_the_end_to_end_error_is_that_of_the_step_before(sharded: bool) -> None:
    recorder = Recorder(Probe(end_to_end=True))
    sync = engine(TWO, sharded=sharded)
    AdaptiveDriver(recorder, sync)
    grads = gradients(0)
    result = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    reduce_step(sync, gradients(1))
    assert recorder.telemetry[0].end_to_end == {}
    for name in WEIGHTS:
        found = recorder.telemetry[1].end_to_end[name]
        error, mean = float((result[name] - grads[name]).square().sum()), float(grads[name].square().sum())
        assert (found.error, found.mean) == pytest.approx((error, mean), rel=0.1)  # from a sample


def test_nothing_is_measured_unless_asked() -> None:
    recorder = Recorder(Probe())
    sync = engine(Dense())
    AdaptiveDriver(recorder, sync)
    for step in range(3):
        reduce_step(sync, gradients(step))
    assert sync.rank_state["window"].state_dict()["sums"] == {}
    assert all(
        replace(telemetry, progress=Progress(step=0)) == Telemetry(progress=Progress(step=0))
        for telemetry in recorder.telemetry
    )


def test_decisions_are_applied_by_regrouping() -> None:
    sync = engine(Dense())
    driver = AdaptiveDriver(Schedule([Phase(compressor=EIGHT), Phase(compressor=TWO, start=2)]), sync)
    bits = []
    for step in range(4):
        reduce_step(sync, gradients(step))
        bits.append(sync.state.assignments[WEIGHTS[0]].method.uplink.fmt.bits)
    assert bits == [8, 8, 2, 2]
    assert [(event.step, event.switch.after) for event in driver.events] == [
        (0, "loco(bits=8, block_size=64, reset_steps=None)"),
        (2, "loco(bits=2, block_size=64, reset_steps=None)"),
    ]


def test_decisions_name_no_parameter_that_every_level_exempts() -> None:
    sync = engine(Dense())
    driver = AdaptiveDriver(Schedule([Phase(compressor=EIGHT), Phase(compressor=TWO, start=1)]), sync)
    for step in range(2):
        reduce_step(sync, gradients(step))
        assert driver.levels.keys() == set(WEIGHTS)
    assert sync.state.assignments["bias"].kind == "exempt"


def test_an_overflowed_step_is_not_decided_twice_and_teaches_nothing() -> None:
    recorder = Recorder(Probe(accumulate="local", levels=(0,)), read_every=2)
    sync = engine(Dense(), skips_overflow=True)
    AdaptiveDriver(recorder, sync)
    reduce_step(sync, gradients(0))
    bad = gradients(1)
    bad[WEIGHTS[0]][5] = math.inf
    reduce_step(sync, bad)
    reduce_step(sync, gradients(1))
    reduce_step(sync, gradients(2))
    assert [telemetry.progress.step for telemetry in recorder.telemetry] == [0, 1, 2]
    assert all(math.isfinite(norm) for norm in recorder.telemetry[2].accumulated_norm.values())
    assert math.isfinite(recorder.telemetry[2].energy[0][WEIGHTS[0]].error)


CONTROLLERS: dict[str, Controller] = {
    "accordion": Accordion(light=EIGHT, heavy=TWO, interval=3, unit="steps"),
    "accordion-mean": Accordion(light=EIGHT, heavy=TWO, interval=3, unit="steps", gradient="mean"),
    "batch": AccordionBatch(small=1, large=4, interval=3, unit="steps"),
    "schedule": Schedule([Phase(compressor=EIGHT), Phase(compressor=TWO, start=5)]),
    "guard": Guard(inner=Static(TWO), bounds=Bounds(max_error=0.3, patience=1), fallback=EIGHT, observe_every=2),
}


@pytest.mark.parametrize("name", CONTROLLERS)
@pytest.mark.parametrize(("stop", "sharded"), [(4, True), (5, False), (7, True)])
def test_stop_and_resume_is_as_never_stopped(name: str, sharded: bool, stop: int) -> None:
    check_stop_and_resume(CONTROLLERS[name], sharded=sharded, stop=stop)


def test_a_checkpoint_of_another_controller_is_not_taken() -> None:
    sync, other_sync = engine(Dense()), engine(Dense())
    driver = AdaptiveDriver(CONTROLLERS["schedule"], sync)
    other = AdaptiveDriver(CONTROLLERS["accordion"], other_sync)
    reduce_step(sync, gradients(0))
    state = other.state
    with mock.patch.object(adaptive_driver._log, "warning") as warning:
        other.load_state_dict(driver.state_dict())
    assert other.state == state
    assert "this one starts over" in warning.call_args.args[0]


def test_state_is_plain() -> None:
    sync = engine(Dense())
    AdaptiveDriver(CONTROLLERS["guard"], sync)
    reduce_step(sync, gradients(0))
    buffer = io.BytesIO()
    torch.save(capture(sync), buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["extra"]["adaptive"]["controller"] == "Guard"
