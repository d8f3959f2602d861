"""Groups of parameters: what belongs together in reports and decisions."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from lowbit_strategy.control.levels import labels
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec

GroupBy = Literal["kind", "module", "parameter"] | Callable[[str], str]


def group_of(name: str, by: GroupBy = "kind") -> str:
    """The group of a parameter.

    ``kind``: numbers in the name do not count, so the same layer of all blocks is one group
    (``blocks.3.mlp.weight`` -> ``blocks.*.mlp.weight``); ``module``: without the parameter's own name;
    ``parameter``: each its own; or a function of the name.
    """
    if callable(by):
        return by(name)
    if by == "kind":
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
    return name.rpartition(".")[0] or name if by == "module" else name


def check_group_by(by: GroupBy) -> None:
    """Raises:
    ValueError: Neither a known way nor a function.
    """
    if not callable(by) and by not in ("kind", "module", "parameter"):
        raise ValueError(f"group_by must be 'kind', 'module', 'parameter' or a function of a name, got {by!r}")


def grouped(names: Iterable[str], by: GroupBy) -> dict[str, list[str]]:
    """Names by group, in the order in which groups first occur."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(group_of(name, by), []).append(name)
    return groups


State = dict[str, Any]
Accumulate = Literal["local", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where training stands when a step begins; the same on all ranks.

    Args:
        step: Optimizer steps completed.
        epoch: Epochs completed.
        num_steps: Optimizer steps planned, None if that is not known.
        steps_per_epoch: Optimizer steps of one epoch, likewise.
        learning_rate: What the first parameter group has in the step that begins; None if it is not known.
    """

    step: int
    epoch: int = 0
    num_steps: int | None = None
    steps_per_epoch: int | None = None
    learning_rate: float | None = None


class Energy(NamedTuple):
    """Squared norms of one parameter, summed over ranks: compensated gradient, what was sent of it, the difference."""

    compensated: float
    sent: float
    error: float


class EndToEnd(NamedTuple):
    """Squared norms of one parameter, estimated from a sample: the result minus the true mean over ranks, that mean."""

    error: float
    mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """What a controller may know, by parameter name where it is about parameters; empty where no probe has asked.

    Args:
        progress: Where training stands.
        accumulated_norm: Norm, over ranks, of the gradient summed over the steps since it was last read.
        accumulated_square: The sum of the squared norms of the same gradients, over the same steps and ranks; only if
            the probes had `square`.
        accumulated_steps: How many steps these were.
        energy: What each level has that was tried in the last step.
        residual_norm: Over ranks, before the last step, for the parameters that `energy` is about.
        end_to_end: What the whole reduction of the last step, both hops, had with what was in force.
        step_seconds: Wall time of the last step, mean over ranks; None if it was not asked for or not yet known.
    """

    progress: Progress
    accumulated_norm: Mapping[str, float] = field(default_factory=dict)
    accumulated_square: Mapping[str, float] = field(default_factory=dict)
    accumulated_steps: int = 0
    energy: Mapping[int, Mapping[str, Energy]] = field(default_factory=dict)
    residual_norm: Mapping[str, float] = field(default_factory=dict)
    end_to_end: Mapping[str, EndToEnd] = field(default_factory=dict)
    step_seconds: float | None = None


def end_to_end_error(telemetry: Telemetry, names: Sequence[str]) -> float | None:
    """``||result - mean|| / ||mean||`` of several parameters together; None if it was not measured."""
    sums = [telemetry.end_to_end[name] for name in names if name in telemetry.end_to_end]
    mean = sum(each.mean for each in sums)
    return math.sqrt(sum(each.error for each in sums) / mean) if mean > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a controller requests to be measured in the step that begins.

    Everything is off by default and then costs nothing.

    Args:
        accumulate: Add this step's gradients to the sum whose norm is read later: each rank's own (``local``; float32
            of one whole model) or the mean over ranks (``mean``; under FSDP2 only the own shard is kept).
        square: Add their squared norms as well; only together with `accumulate`.
        levels: Levels to try on this step's gradients, whatever is in force: each costs an encode and a decode.
        end_to_end: The error of the whole reduction, from a sample of a few kilobytes per parameter.
        seconds: Wall time.
    """

    accumulate: Accumulate | None = None
    square: bool = False
    levels: tuple[int, ...] = ()
    end_to_end: bool = False
    seconds: bool = False


class Switch(NamedTuple):
    """One change, for logs: which parameters or what else, from and to, and why."""

    what: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What a controller decides for the step that begins.

    Args:
        state: The controller's next state.
        levels: Index into the controller's levels for every parameter. Empty: leave methods alone.
        probe: What to measure.
        switches: What changed and why.
        warnings: People read them; they are logged each time they are given.
        accumulation: Batches accumulated into one optimizer step; None leaves them alone.
        learning_rate_factor: On top of the scheduler's learning rate.
        every: Local steps: optimizer steps of each round that begins from now on; None: as the outer rule has it.
    """

    state: State
    levels: Mapping[str, int] = field(default_factory=dict)
    probe: Probe = Probe()
    switches: tuple[Switch, ...] = ()
    warnings: tuple[str, ...] = ()
    accumulation: int | None = None
    learning_rate_factor: float = 1.0
    every: int | None = None


class Controller(ABC):
    """A frozen dataclass; all that changes is in the state that is passed in and returned.

    `levels` are configurations from the lightest compression to the heaviest. Which parameters are exempt is each
    level's own business: a controller may choose a level for them too, to no effect.
    """

    @property
    @abstractmethod
    def levels(self) -> tuple[Compressor, ...]: ...

    @property
    def initial_accumulation(self) -> int | None:
        """Batches in the first step, if the controller decides on that."""
        return None

    @abstractmethod
    def init(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool = False) -> State:
        """The state before the first step.

        Args:
            specs: The model's parameters.
            world_size: Ranks.
            scatter: Gradients are reduce-scattered (FSDP2): there is no downlink.

        Raises:
            ValueError: The configuration cannot serve this model.
        """

    def reads_accumulated(self, progress: Progress, state: State) -> bool:
        """Whether this step's telemetry must have ``accumulated_norm`` (the sums start again from zero then)."""
        return False

    @abstractmethod
    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        """At the start of every step. Leaves `state` as it is."""

    def switches(
        self, before: Mapping[str, int], after: Mapping[str, int], reasons: Mapping[str, str]
    ) -> tuple[Switch, ...]:
        """One `Switch` for each way that parameters went, with all the parameters that went it for the same reason."""
        texts = labels(self.levels)
        ways: dict[tuple[str, str, str], list[str]] = {}
        for name, level in after.items():
            if before.get(name) != level:
                origin = texts[before[name]] if name in before else "start"
                ways.setdefault((origin, texts[level], reasons.get(name, "")), []).append(name)
        return tuple(Switch(_names(names, len(after)), *way) for way, names in ways.items())


def _names(names: Sequence[str], everything: int) -> str:
    if len(names) == everything:
        return "all parameters"
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
