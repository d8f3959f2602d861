"""A fragment under way, and who brings it to the other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending, wait_for_all
from lowbit_strategy.engine.bucket import Stages
from lowbit_strategy.engine.bucket_schedule import BucketSchedule
from lowbit_strategy.rounds.fragment import Fragment
from lowbit_strategy.rounds.turn_header import TurnHeader


class AsyncReducer(Protocol):
    """Reduces what it is given while its caller goes on."""

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> Pending: ...


class Inline:
    """A reducer all of whose results have arrived when `submit` of the last one returns."""

    def __init__(self) -> None:
        self._schedule = BucketSchedule()

    def submit(self, *pieces: Stages, result: Tensor, last: bool) -> Pending:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[result.device] if result.is_cuda else None)
        try:
            self._schedule.start(pieces, result, future, last=last)
        except Exception as error:
            self._schedule.fail(error)
            raise
        return future


@dataclass(slots=True)
class InFlight:
    """A fragment under way.

    Args:
        fragment: Its index.
        x: The pseudo-gradient; once it has arrived, the mean.
        header: What travels with it.
        arrivals: Of the header and of its buckets.
        delay: Optimizer steps after which it is applied.
        age: Optimizer steps since it was sent.
        weights: What each rank counts in the mean, 1 on average; empty: 1.
    """

    fragment: int
    x: Tensor
    header: TurnHeader
    arrivals: Sequence[Pending]
    delay: int
    age: int = 0
    weights: tuple[float, ...] = ()

    def share_of(self, ranks: Sequence[int]) -> float:
        """What these ranks count in the mean together."""
        return sum(self.weights[rank] if self.weights else 1.0 for rank in ranks)

    def wait(self) -> None:
        """Until it has arrived as a whole."""
        wait_for_all(self.arrivals)

    def state_dict(self, fragments: Sequence[Fragment]) -> dict[str, Any]:
        """Of what has arrived."""
        means = fragments[self.fragment].views(self.x)
        return {"means": means, "header": self.header.state_dict(), "delay": self.delay, "age": self.age}

    @classmethod
    def from_state(
        cls, saved: Mapping[str, Any] | None, fragments: Sequence[Fragment], device: torch.device
    ) -> InFlight | None:
        """What was under way; None if nothing was, or the model is cut otherwise: other parameters are trained."""
        if saved is None:
            return None
        for at, fragment in enumerate(fragments):
            if fragment.anchors.keys() == saved["means"].keys():
                x_N = torch.empty(fragment.numel, dtype=torch.float32, device=device)
                for name, view in fragment.views(x_N).items():
                    view.copy_(saved["means"][name])
                return cls(at, x_N, TurnHeader.from_state(saved["header"], device), (), saved["delay"], saved["age"])
        return None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that this replica has received as a whole, and of which it does not know whether all have.

    Args:
        in_flight: The turn.
        history: What the history becomes if it counts.
        before: Turn, steps since the last one and length of the round, if it does not.
        done: This replica trains no more.
    """

    in_flight: InFlight
    history: int
    before: tuple[int, int, int]
    done: bool

    @property
    def ends(self) -> bool:
        """Whether nobody who takes part trains any more."""
        return self.done and self.in_flight.header.num_done == self.in_flight.header.world_size
