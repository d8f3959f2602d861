"""What an engine knows of others: state that is saved with its own, who reduces in rounds, who is called in a step.

| phase | who | may |
|---|---|---|
| `DECIDE` | controllers | give parameters other methods |
| `OBSERVE` | monitors | look at what the methods make of the gradients |
| `RECORD` | everyone else | read |

A step begins in this order. It ends with what observers have measured, then decisions, then records. Within a phase the
order is that of subscription. A rank may end its step alone; what ranks exchange about it comes `together`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.collectives.exchange import StepFlags, WireBuffers
from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.engine.bucket import BucketLayout, BucketObserver
from lowbit_strategy.plan.rounds import RoundPlan


class Stateful(Protocol):
    """Something else that is saved and restored with the residuals: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RankState(Protocol):
    """State that each rank has for itself, saved in its own file: plain dicts, numbers, strings and tensors."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], *, own: bool) -> None:
        """`own`: it is this rank's own state; if not, of another one of a run on another number of ranks."""

    def forget(self) -> None:
        """The state is lost: go on from what all ranks share."""


class PartState(Protocol):
    """Values of parameters, of each of which a rank has a part or all: nested plain data."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, states: Iterable[Mapping[str, Any]]) -> None:
        """What ranks have saved, this rank's state first, then those of all in rank order: each is read when asked for.
        The layout may be another one.
        """

    def forget(self) -> None:
        """The state is lost: begin again."""


class NodeMeans(Protocol):
    """Means over the ranks of a node, in the place of exact ones."""

    flags: StepFlags

    def mean(
        self,
        layout: BucketLayout,
        params: Callable[[], Iterable[ParamView]],
        x: Tensor,
        out: Tensor,
        buffers: WireBuffers,
    ) -> Iterator[Pending]:
        """The mean of one part of a bucket, in whose place `out` is written; yields while bytes travel."""

    def mean_of_rows(self, layout: BucketLayout, names: Iterable[str], x: Tensor, out_GN: Tensor) -> Iterator[Pending]:
        """The same where FSDP2 has put a row for each rank together: of G nodes, or of the own node alone."""

    def end_step(self) -> None:
        """Raises:
        RuntimeError: On CUDA: in an earlier step a rank of the node sent a message of another layout.
        """


class Follower:
    """Nobody. Who follows gradients to the optimizers' steps derives from this."""

    def stepped(self, optimizer: Optimizer) -> None:
        """It has stepped on what was reduced."""

    def keep(self, names: Sequence[str]) -> None:
        """These parameters are about to be reduced, and the reduction may be rolled back."""

    def roll_back(self, names: Iterable[str]) -> None:
        """It was."""

    @contextmanager
    def taken_back(self, names: Iterable[str]) -> Iterator[None]:
        """A context, for a checkpoint, in which what is kept of these parameters is as before."""
        yield

    def name_parameters(self) -> None:
        """The model has others now."""


ROUNDS_KEY = "outer"  # where the state of who reduces in rounds is saved, in rounds or not yet


class Rounds(Protocol):
    """Who reduces something in rounds of several steps, while gradients stay on their rank.

    Attributes:
        every: Optimizer steps of each coming round, as a controller chooses; None: as planned.
    """

    every: int | None

    @property
    def round_plan(self) -> RoundPlan:
        """The current round."""

    @property
    def drift(self) -> float | None:
        """How far ranks had drifted apart before the last meeting; see `Observation`."""


class StepPhase(IntEnum):
    """When a listener is called."""

    DECIDE = 0
    OBSERVE = 1
    RECORD = 2


class StepListener(Protocol):
    """Someone who measures, decides or records."""

    def begin_step(self) -> BucketObserver | None:
        """Begin a step, before anything of it is reduced. Returns who looks at the step's buckets."""

    def end_step(self, *, counted: bool) -> None:
        """The step is over, on this rank. `counted`: it did not overflow."""


_END_ORDER = (StepPhase.OBSERVE, StepPhase.DECIDE, StepPhase.RECORD)


class Listeners:
    """The listeners of one engine, by phase."""

    def __init__(self) -> None:
        self._by_phase: defaultdict[StepPhase, list[StepListener]] = defaultdict(list)
        self._together: list[Callable[[], None]] = []

    def __getitem__(self, phase: StepPhase) -> list[StepListener]:
        return self._by_phase[phase]

    def add(self, listener: StepListener, phase: StepPhase) -> None:
        self[phase].append(listener)

    def remove(self, listener: StepListener) -> None:
        for listeners in self._by_phase.values():
            if listener in listeners:
                listeners.remove(listener)

    def begin_step(self, phase: StepPhase) -> list[BucketObserver]:
        """Returns the observers of the step's buckets."""
        observers = [listener.begin_step() for listener in self[phase]]
        return [observer for observer in observers if observer is not None]

    def end_step(self, *, counted: bool) -> None:
        for phase in _END_ORDER:
            for listener in list(self[phase]):
                listener.end_step(counted=counted)

    def together(self, call: Callable[[], None]) -> None:
        """`call` when all ranks have ended the step: it may exchange something. Of listeners in `end_step`."""
        self._together.append(call)

    def meet(self) -> None:
        """All ranks have ended the step."""
        calls, self._together = self._together, []
        for call in calls:
            call()
