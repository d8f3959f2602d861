"""A controller's factor on learning rates: in the steps of an optimizer, and nowhere else. When a record begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_strategy import Dense, LoCo
from lowbit_strategy.adaptation.model_control import ModelControl
from lowbit_strategy.adaptation.monitor_options import MonitorOptions
from lowbit_strategy.control import Accordion
from lowbit_strategy.custom_loop import LoopClock
from testing.record import read_record
from testing.worlds.single import engine, gradients, reduce_step


class Outer(torch.optim.SGD):
    """Steps another optimizer, whose rates it sets, as ``ZeroRedundancyOptimizer`` does."""

    def __init__(self, params: Any, inner: torch.optim.Optimizer) -> None:
        super().__init__(params, lr=0.5)
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for own, its in zip(self.param_groups, self.inner.param_groups, strict=True):
            its["lr"] = own["lr"]
        self.inner.step()
        return loss


@pytest.fixture
def control() -> ModelControl:
    made = ModelControl(engine(Dense()))
    made.factor = 4.0
    return made


def _param() -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.ones(2)
    return param


def test_it_is_applied_once_however_optimizers_are_nested(control: ModelControl) -> None:
    param = _param()
    outer = Outer([param], torch.optim.SGD([param], lr=9.0))
    with control.scaled(outer) as closure:
        outer.step(closure)
    assert param.tolist() == [-2.0, -2.0]
    assert outer.param_groups[0]["lr"] == 0.5


def test_it_begins_when_gradients_are_there_and_once(control: ModelControl) -> None:
    """The closure's forward and backward pass, in which controllers look at the rate, comes before."""
    optimizer = torch.optim.LBFGS([_param()], lr=0.5, max_iter=3)
    seen = []

    def compute() -> torch.Tensor:
        seen.append(optimizer.param_groups[0]["lr"])
        return torch.tensor(float(-len(seen)))

    with control.scaled(optimizer, compute) as closure:
        optimizer.step(closure)
    assert seen[0] == 0.5
    assert set(seen[1:]) == {2.0}
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_rates_are_put_back_after_a_step_that_fails_or_is_skipped(control: ModelControl) -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([_param()], lr=rate)
    seen = []

    def fail() -> None:
        with control.scaled(optimizer):
            seen.append(float(optimizer.param_groups[0]["lr"]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert seen == [2.0]
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == 0.5
    with control.scaled(optimizer, lambda: None):
        """A scaler has found an overflow."""
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize("monitor_first", [True, False])
@pytest.mark.parametrize("of_clock", [0.25, None])
def test_the_clock_s_rate_comes_before_the_monitor_s(monitor_first: bool, of_clock: float | None) -> None:
    control = ModelControl(engine(Dense()))
    given = None if of_clock is None else torch.optim.SGD([_param()], lr=of_clock)
    parts = [
        lambda: control.monitor(MonitorOptions(), optimizer=torch.optim.SGD([_param()], lr=0.5)),
        lambda: control.adapt(Accordion(light=LoCo(bits=8), heavy=LoCo(bits=2)), LoopClock(given, num_steps=9)),
    ]
    for part in parts if monitor_first else reversed(parts):
        part()
    progress = control.progress(3)
    assert (progress.num_steps, progress.learning_rate) == (9, of_clock or 0.5)


@pytest.mark.filterwarnings("error")
def test_a_monitor_that_joins_during_training_has_its_record(tmp_path: Path) -> None:
    sync = engine(Dense())
    control = ModelControl(sync)
    control.begin_pass(None)
    reduce_step(sync, gradients(0))
    control.monitor(MonitorOptions(every_n_steps=1))
    control.folder = tmp_path
    control.begin_pass(torch.tensor(2.5, requires_grad=True))
    reduce_step(sync, gradients(1))
    sync.listeners.all_have_ended()
    assert [(line["kind"], line["step"], line.get("loss")) for line in read_record(tmp_path)] == [
        ("start", 1, None),
        ("observation", 1, 2.5),
    ]
