"""A fragment under way, and who brings it to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.engine.bucket import Stages
from lowbit_strategy.rounds.turn_header import TurnHeader


class Arrival(Protocol):
    """Waits until something that travels has arrived."""

    def wait(self) -> object: ...


class AsyncReducer(Protocol):
    """Reduces what it is given while its caller goes on."""

    def submit(self, stages: Stages, result: Tensor, *, last: bool) -> Arrival: ...


class Arrived:
    def wait(self) -> None:
        return None


class Inline:
    """A reducer whose result has arrived when `submit` returns."""

    def submit(self, stages: Stages, result: Tensor, *, last: bool) -> Arrival:
        wait_for_all(stages)
        return Arrived()


@dataclass(slots=True)
class InFlight:
    """A fragment under way.

    Args:
        fragment: Its index.
        x: The pseudo-gradient; once it has arrived, the mean.
        header: What travels with it.
        arrivals: Of its buckets; the first one's is the header's too.
        delay: Optimizer steps after which it is applied.
        age: Optimizer steps since it was sent.
    """

    fragment: int
    x: Tensor
    header: TurnHeader
    arrivals: Sequence[Arrival]
    delay: int
    age: int = 0

    def wait(self) -> None:
        """Until it has arrived as a whole."""
        for arrival in self.arrivals:
            arrival.wait()
