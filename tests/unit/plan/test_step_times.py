"""How long steps take, and what of them is spent waiting."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lowbit_strategy.plan.step_times import StepClock


@pytest.fixture
def clock() -> StepClock:
    return StepClock(torch.device("cpu"))


def test_steps_and_what_they_wait_for_another_thread(clock: StepClock) -> None:
    clock.start()
    time.sleep(0.02)
    done = clock.wait()
    assert done is not None
    waits = threading.Timer(0.05, done)
    waits.start()
    waits.join()
    clock.end_step()
    done = clock.wait()
    assert done is not None
    time.sleep(0.03)
    done()
    time.sleep(0.02)
    clock.end_step()
    first, second = clock.take()
    assert first.seconds >= 0.07
    assert second.seconds >= 0.05
    assert first.waited_s is not None
    assert second.waited_s is not None
    assert 0.05 <= first.waited_s <= first.seconds - 0.02
    assert 0.03 <= second.waited_s <= second.seconds - 0.02


def test_nothing_is_kept_unless_it_is_to_be_timed(clock: StepClock) -> None:
    clock.end_step()
    assert clock.wait() is None
    assert clock.take() == []
    clock.start()
    clock.end_step()
    assert [step.waited_s for step in clock.take()] == [None]
    clock.end_step()
    assert clock.take() == []


def test_a_wait_that_ends_late_counts_where_it_began(clock: StepClock) -> None:
    clock.start()
    done = clock.wait()
    assert done is not None
    clock.end_step()
    clock.end_step()
    time.sleep(0.01)
    done()
    first, second = clock.take()
    assert first.waited_s is not None
    assert first.waited_s >= 0.01
    assert second.waited_s == 0.0
