"""The interface of controllers: telemetry and state in, a decision and the next state out.

Every rank runs the same controller on the same telemetry, so all ranks decide the same. Telemetry is summed over ranks
before a controller sees it. State is plain numbers, strings, lists and dicts, and is saved in checkpoints.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.inform import listed
from lowbit_strategy.methods._base.compressor import REFERENCE, Compressor

State = dict[str, Any]
Accumulate = Literal["local", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The progress of training when a step begins; the same on all ranks.

    Args:
        step: Optimizer steps completed.
        epoch: Epochs completed; None: nothing counts them.
        num_steps: Planned optimizer steps; None: unknown.
        steps_per_epoch: Optimizer steps per epoch; None: unknown.
        learning_rate: Learning rate of the first parameter group in the step that begins; None: unknown.
    """

    step: int
    epoch: int | None = None
    num_steps: int | None = None
    steps_per_epoch: int | None = None
    learning_rate: float | None = None

    @property
    def known_epoch(self) -> int:
        """The epoch, for controllers that count in epochs.

        Raises:
            ValueError: It is unknown.
        """
        if self.epoch is None:
            raise ValueError(
                "the controller counts in epochs, but nothing counts them here: count in steps, or give"
                " steps_per_epoch, or set the epoch in the loop (accelerator.lowbit.epoch, a LoopClock's epoch)"
            )
        return self.epoch


class Energy(NamedTuple):
    """One parameter's squared norms, summed over ranks: compensated gradient, what was sent, the difference."""

    compensated: float
    sent: float
    error: float


class EndToEnd(NamedTuple):
    """One parameter's squared norms, estimated from a sample: result minus true mean over ranks, and that mean."""

    error: float
    mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Telemetry:
    """The input of a controller. Mappings are by parameter name, and empty unless a probe requested them.

    Args:
        progress: The progress of training.
        accumulated_norm: Norm over ranks of the gradient summed over the steps since it was last read.
        accumulated_square: Sum of the squared norms of the same gradients, if the probes had `square`.
        accumulated_steps: Number of steps in these sums.
        energy: Energies for each level that was tried in the last step.
        residual_norm: Norm over ranks of the residuals, before the last step, of the parameters in `energy`.
        end_to_end: Error of the whole last reduction over both hops, with the current levels.
        step_seconds: Wall time of the last step, averaged over ranks; None: not requested, or not yet known.
    """

    progress: Progress
    accumulated_norm: Mapping[str, float] = field(default_factory=dict)
    accumulated_square: Mapping[str, float] = field(default_factory=dict)
    accumulated_steps: int = 0
    energy: Mapping[int, Mapping[str, Energy]] = field(default_factory=dict)
    residual_norm: Mapping[str, float] = field(default_factory=dict)
    end_to_end: Mapping[str, EndToEnd] = field(default_factory=dict)
    step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """The measurements to take in the step that begins. All are off by default; what is off costs nothing.

    Args:
        accumulate: Add this step's gradients to a sum whose norm is read later: each rank's own gradients (``local``;
            needs a float32 copy of the model) or the mean over ranks (``mean``; under FSDP2 this rank's shard).
        square: Also add their squared norms; requires `accumulate`.
        levels: Levels to try on this step's gradients. Each costs an encode and a decode.
        end_to_end: Error of the whole reduction, from a sample of a few kilobytes per parameter.
        seconds: Wall time of the step.
    """

    accumulate: Accumulate | None = None
    square: bool = False
    levels: tuple[int, ...] = ()
    end_to_end: bool = False
    seconds: bool = False


class Switch(NamedTuple):
    """One change, for logs: the parameters, both levels, and the reason."""

    what: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A controller's decision for the step that begins.

    Args:
        state: The controller's next state.
        levels: For every parameter, an index into the controller's levels. Empty: unchanged.
        probe: The measurements to take.
        switches: The changes and their reasons.
        warnings: Warnings to log.
        accumulation: Batches accumulated per optimizer step; None: unchanged.
        learning_rate_factor: Factor that multiplies the scheduler's learning rate.
        every: Optimizer steps per round from now on, if ranks meet in rounds; None: as planned.
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
    """Base class of controllers, which are frozen dataclasses. All mutable state is passed in and returned.

    `levels` go from the lightest compression to the heaviest. Each level has its own exempt parameters, for which
    choosing the level has no effect.
    """

    @property
    @abstractmethod
    def levels(self) -> tuple[Compressor, ...]: ...

    @property
    def initial_accumulation(self) -> int | None:
        """Batches accumulated in the first step; None: the controller does not set it."""
        return None

    @abstractmethod
    def init(self, specs: Sequence[TensorSpec], world_size: int) -> State:
        """The state before the first step.

        Args:
            specs: The model's parameters.
            world_size: Number of ranks.

        Raises:
            ValueError: The configuration does not support this model.
        """

    def reads_accumulated(self, progress: Progress, state: State) -> bool:
        """Whether this step's telemetry needs ``accumulated_norm``. Reading it resets the sums."""
        return False

    @abstractmethod
    def decide(self, telemetry: Telemetry, state: State) -> Decision:
        """Decide for the step that begins. Called at the start of every step; must not modify `state`."""

    def switches(
        self, before: Mapping[str, int], after: Mapping[str, int], reasons: Mapping[str, str]
    ) -> tuple[Switch, ...]:
        """One `Switch` for each group of parameters that changed in the same way for the same reason."""
        texts = labels(self.levels)
        changes: dict[tuple[str, str, str], list[str]] = {}
        for name, level in after.items():
            if before.get(name) != level:
                origin = texts[before[name]] if name in before else "start"
                changes.setdefault((origin, texts[level], reasons.get(name, "")), []).append(name)
        return tuple(Switch(_names(names, len(after)), *change) for change, names in changes.items())


def _names(names: Sequence[str], everything: int) -> str:
    return "all parameters" if len(names) == everything else listed(names)


_REFERENCE_WORLD_SIZE = 4
_STRENGTHS = ("bits", "density", "rank")


def reference_nbytes(level: Compressor) -> int:
    """Bytes that four ranks send for a 1024 x 1024 matrix that is neither exempt nor high-precision."""
    return level.method(REFERENCE).wire_nbytes(REFERENCE, _REFERENCE_WORLD_SIZE)


def check_order(levels: Sequence[Compressor], names: Sequence[str]) -> None:
    """Check that each level sends fewer bytes than the one before it.

    Raises:
        ValueError: A level does not.
    """
    sized = [(level, name, reference_nbytes(level)) for level, name in zip(levels, names, strict=True)]
    for (lighter, lighter_name, more), (heavier, heavier_name, fewer) in pairwise(sized):
        if fewer >= more:
            raise ValueError(
                f"{heavier_name} must compress more than {lighter_name}, but {describe(heavier)} sends {fewer:,}"
                f" bytes where {describe(lighter)} sends {more:,}: swap them, or change their options"
            )


def describe(level: Compressor) -> str:
    """Describe a level: name, strength, and options that differ from the defaults."""
    options = []
    for entry in dataclasses.fields(level):
        value = getattr(level, entry.name)
        if entry.name in _STRENGTHS or (entry.name not in ("exempt", "high_precision") and value != entry.default):
            options.append(f"{entry.name}={value:.6g}" if isinstance(value, float) else f"{entry.name}={value!r}")
    return f"{level.name}({', '.join(options)})"


def labels(levels: Sequence[Compressor]) -> tuple[str, ...]:
    """A description of each level, numbered if two would be the same."""
    texts = [describe(level) for level in levels]
    return tuple(text if texts.count(text) == 1 else f"{text} #{at}" for at, text in enumerate(texts))
