"""What a step waits for on a GPU: the side stream that reduces gradients, by the device's own clock."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.hooks.runners import SideStream
from lowbit_strategy.plan.step_times import StepClock


def call_after(future: torch.futures.Future[torch.Tensor], done: Callable[[], None]) -> None:
    future.add_done_callback(lambda _: done())


def test_work_of_the_side_stream_is_waited_for() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.rand(4096, 4096, device=device)
    gradient = torch.empty_like(x)

    def reduce() -> Stages:
        for _ in range(20):
            torch.mm(x, x, out=gradient)
        yield from ()

    side, clock = SideStream(device), StepClock(device)
    for _ in range(2):  # the first one loads what it needs
        clock.start()
        torch.mm(x, x)
        future = side.submit(reduce(), result=gradient, last=True)
        done = clock.wait()
        assert done is not None
        call_after(future, done)
        future.wait()
        torch.mm(x, x)
        clock.end_step()
        (step,) = clock.take()
    assert step.waited_s is not None
    assert 0.5 * step.seconds < step.waited_s < step.seconds
