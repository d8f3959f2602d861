"""What optimizers take of a step, whoever calls them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from lowbit_strategy.advisor import clocks
from lowbit_strategy.advisor.clocks import OptimizerClock
from testing.training.regression import Regression, loader

COMPUTING_S, STEPPING_S, STEPS = 4.0, 1.0, 3
_now_s = 0.0


def _spend(seconds: float) -> None:
    global _now_s
    _now_s += seconds


class Slow(torch.optim.SGD):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        _spend(STEPPING_S)
        return loss


class Model(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _spend(COMPUTING_S)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return Slow(self.parameters(), lr=0.01)


def lightning() -> None:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    L.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, **quiet).fit(Model(), loader(64))  # type: ignore[arg-type]


def by_hand(call: Callable[[Slow, Callable[[], Tensor]], object]) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Slow([weight], lr=0.1)

    def closure() -> Tensor:
        _spend(COMPUTING_S)
        loss = weight.square().sum()
        loss.backward()
        return loss

    for _ in range(STEPS):
        call(optimizer, closure)


def stepped(optimizer: Slow, closure: Callable[[], Tensor]) -> None:
    closure()
    optimizer.step()


def accelerated(optimizer: Slow, closure: Callable[[], Tensor]) -> None:
    closure()
    Accelerator(cpu=True).prepare(optimizer).step()


LOOPS: dict[str, Callable[[], None]] = {
    "lightning": lightning,
    "steps": lambda: by_hand(stepped),
    "accelerate": lambda: by_hand(accelerated),
    "closure": lambda: by_hand(lambda optimizer, closure: optimizer.step(closure)),
    "closure by name": lambda: by_hand(lambda optimizer, closure: optimizer.step(closure=closure)),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_neither_forward_nor_backward_counts(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: _now_s))
    clock = OptimizerClock(torch.device("cpu"))
    LOOPS[loop]()
    assert clock.take() == STEPS * STEPPING_S
    assert clock.take() == 0.0


def test_other_arguments_reach_an_optimizer_as_they_are() -> None:
    """One of the user's own may take what it likes."""
    given: list[Any] = []

    class Own(torch.optim.SGD):
        def step(self, first: Any, second: Any = None, *, scale: float = 1.0) -> Any:  # type: ignore[override]
            given.append((first() if callable(first) else first, second, scale))

    clock = OptimizerClock(torch.device("cpu"))
    optimizer: Any = Own([nn.Parameter(torch.ones(3))], lr=0.0)
    optimizer.step(0.5, "two", scale=3.0)
    optimizer.step(lambda: 7.0, "two", scale=3.0)
    assert given == [(0.5, "two", 3.0), (7.0, "two", 3.0)]
    assert clock.take() > 0


@pytest.mark.filterwarnings("error:Dynamo does not know")
def test_a_step_that_is_compiled_is_left_alone() -> None:
    clock = OptimizerClock(torch.device("cpu"))
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        weight.grad = torch.ones(3)
        step()
    assert clock.take() == 0.0
    assert (weight < 1).all()


def test_a_closure_is_handed_on_as_it_is_where_no_clock_runs() -> None:
    """And its loss comes back where one does."""
    OptimizerClock(torch.device("cpu"))  # gone at once
    losses, given = [], []

    class Given(torch.optim.SGD):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
            given.append(closure)
            return super().step(closure)

    optimizer = Given([nn.Parameter(torch.ones(3))], lr=0.0)

    def closure() -> Tensor:
        return torch.tensor(7.0)

    losses.append(optimizer.step(closure))
    clock = OptimizerClock(torch.device("cpu"))
    losses.append(optimizer.step(closure))
    assert clock.take() > 0
    assert losses == [7.0, 7.0]
    assert given[0] is closure
    assert given[1] is not closure
