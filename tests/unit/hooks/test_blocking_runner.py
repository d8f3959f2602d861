"""What the synchronization of a fragment sends, where nothing is trained meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lowbit_strategy.hooks.runners import BlockingRunner


class Travel:
    """Bytes under way to ranks that are far apart."""

    is_far = True

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait(self) -> None:
        self.log.append(f"arrived {self.name}")


def stages(name: str, log: list[str], *, fails: bool = False) -> Iterator[Travel]:
    for exchange in range(2):
        log.append(f"left {name}{exchange}")
        yield Travel(f"{name}{exchange}", log)
        if fails:
            raise ConnectionError("the link is down")
    log.append(f"end {name}")


def test_all_buckets_leave_before_one_is_waited_for() -> None:
    """Two messages in series for the whole fragment, and not two for each bucket."""
    log: list[str] = []
    runner = BlockingRunner()
    arrivals = [runner.submit(stages(name, log), result=torch.zeros(1), last=name == "c") for name in "abc"]
    for arrival in arrivals:
        arrival.wait()
    assert log == [
        *("left a0", "left b0", "left c0"),
        *("arrived a0", "left a1", "arrived b0", "left b1", "arrived c0", "left c1"),
        *("arrived a1", "end a", "arrived b1", "end b", "arrived c1", "end c"),
    ]


def test_what_failed_is_raised_and_the_next_one_starts_anew() -> None:
    log: list[str] = []
    runner = BlockingRunner()
    runner.submit(stages("a", log), result=torch.zeros(1), last=False)
    with pytest.raises(ConnectionError, match="the link is down"):
        runner.submit(stages("b", log, fails=True), result=torch.zeros(1), last=True)
    log.clear()
    runner.submit(stages("c", log), result=torch.zeros(1), last=True).wait()
    assert log == ["left c0", "arrived c0", "left c1", "arrived c1", "end c"]
