"""What a method is: a rule for turning every rank's gradient into their mean, with explicit state.

Two kinds. A *lane* (`stateful_codec.py`) is a codec with a residual rule; all lanes of a bucket share the
same two exchanges. A *reducer* does its own communication: sparse, low-rank and whole-model methods.
A *compressor* is what users write: a configuration that gives each parameter its method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.codecs.dense import DenseCodec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.exchange import StepContext
from lowbit_strategy.collectives.layout import Cut
from lowbit_strategy.methods._base.parameter_selectors import Selector, describe, matching, validate_selectors
from lowbit_strategy.methods._base.stateful_codec import PlainCodec, StatefulCodec
from lowbit_strategy.methods._base.tensor_spec import TensorSpec


class CodecPair(NamedTuple):
    """The lane to the owner and the lane back from it."""

    uplink: StatefulCodec
    downlink: StatefulCodec


class View(NamedTuple):
    """One parameter's gradient in a bucket, as a reducer sees it.

    Args:
        spec: The parameter.
        cut: How it is cut over the ranks.
        x: All-reduce: flat ``[numel]``. Reduce-scatter: ``[W, row_numel]``, row r for rank r, padded with zeros.
        out: All-reduce: the mean goes here, flat ``[numel]``; may be `x` itself. Reduce-scatter: the *sum* of the own
            row, ``[row_numel]``, since FSDP2 divides afterwards.
        scatter: Which of the two.
        compensated: float32 ``[numel]`` to fill with what was to be said (gradient plus residual), or None.
        sent: float32 ``[numel]`` to fill with what was said, as the others decode it, or None.
    """

    spec: TensorSpec
    cut: Cut
    x: Tensor
    out: Tensor
    scatter: bool
    compensated: Tensor | None = None
    sent: Tensor | None = None

    def flat(self) -> Tensor:
        """The whole gradient, flat ``[numel]``, whatever the layout; a copy under reduce-scatter."""
        return self.x.reshape(-1)[: self.spec.numel] if self.scatter else self.x

    def rows(self, values_N: Tensor) -> Tensor:
        """``[W, row_numel]`` of flat ``[numel]``: row r for rank r, padded with zeros."""
        padding = self.cut.row_numel * self.cut.world_size - self.spec.numel
        return torch.nn.functional.pad(values_N, (0, padding)).view(self.cut.world_size, self.cut.row_numel)

    def write_mean_(self, mean_N: Tensor, rank: int) -> None:
        """Store the mean over ranks, flat ``[numel]`` in any float dtype, in the form that `out` wants."""
        if not self.scatter:
            self.out.copy_(mean_N)
            return
        start, length = rank * self.cut.row_numel, self.cut.row_length(rank)
        self.out[:length] = mean_N[start : start + length] * self.cut.world_size
        self.out[length:] = 0


TensorState = dict[str, Tensor]
ReducerState = dict[str, TensorState]


class Reducer(ABC):
    """A method with communication of its own. A frozen dataclass; state is passed in and changed in place.

    ``whole_model`` methods are given all parameters of a step at once: under DDP the hook collects the buckets and
    calls `reduce` on the last one; under FSDP2 each module is its own model.
    """

    whole_model: ClassVar[bool] = False
    fixed_size: ClassVar[bool] = False  # bytes never depend on values: `wire_nbytes` is exact

    @property
    def residual_gain(self) -> float | None:
        """As `Lane.gain`: all that was sent plus ``residual / gain`` is all that came in; None: no such law."""
        return None

    @property
    def label(self) -> str:
        """A few words for reports."""
        return type(self).__name__.removesuffix("Reducer").lower()

    def nearest(self) -> Reducer:
        """As `Codec.nearest`: the least error instead of no bias, for use with feedback."""
        return self

    @abstractmethod
    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        """State by parameter name; what concerns no single parameter goes under the empty name.

        A tensor called ``residual`` is float32 ``[numel]``, flat: it is carried over when the method changes.
        """

    @abstractmethod
    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        """Write every view's mean; yield whenever bytes travel. All ranks call with the same parameters in order."""

    def continues(self, earlier: Method) -> bool:
        """Whether all state that `earlier` leaves means the same to this method, and not the residual alone."""
        return self == earlier

    def rescale_(self, state: ReducerState, factor: float) -> None:
        """The loss scale changed by `factor`: everything that is in units of the gradient follows."""
        for tensors in state.values():
            if "residual" in tensors:
                tensors["residual"].mul_(factor)

    @abstractmethod
    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        """Bytes this rank hands to others for one reduction of `spec`, exact or, for data-dependent sizes, expected."""


Method = CodecPair | Reducer
AssignmentKind = Literal["compressed", "high_precision", "exempt"]


class Assignment(NamedTuple):
    """The method of one parameter, and why."""

    method: Method
    kind: AssignmentKind
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Compressor(ABC):
    """A configuration that gives every parameter its method.

    Args:
        exempt: Parameters that stay dense: names with wildcards (``"*.gate.*"``), the predicates ``"@vector"``
            (fewer than two dims), ``"@small"``, ``"@embedding"``, ``"@head"``, or functions of a `TensorSpec`.
        high_precision: Parameters that get the milder method, likewise. Exemption goes first.
    """

    name: ClassVar[str]
    approaches_mean: ClassVar[bool] = True  # results for one gradient, averaged over many steps, approach the true mean

    exempt: tuple[Selector, ...] = ("@vector", "@small")
    high_precision: tuple[Selector, ...] = ("@embedding", "@head")

    def __post_init__(self) -> None:
        validate_selectors("exempt", self.exempt)
        validate_selectors("high_precision", self.high_precision)

    @abstractmethod
    def method(self, spec: TensorSpec) -> Method:
        """The method of a parameter that is neither exempt nor milder."""

    def high_precision_method(self, spec: TensorSpec) -> Method | None:
        """The method of embeddings and heads; None where the compressor has no milder level."""
        return None

    def check(self, specs: Sequence[TensorSpec]) -> None:  # noqa: B027 (most have nothing to check)
        """Raises:
        ValueError: The configuration does not suit a model of these parameters.
        """

    def at(self, step_index: int) -> Compressor:
        """The configuration in force after `step_index` optimizer steps: itself, unless it has phases."""
        return self

    def conserving(self) -> Compressor:
        """This configuration with nothing given away (exact residuals, no reset, decay or momentum).

        With it the methods' laws of conservation hold to rounding error; the shared tests use it.
        """
        return self

    def exempted(self, spec: TensorSpec) -> Assignment | None:
        """The dense method, for an exempt parameter."""
        selector = matching(self.exempt, spec)
        return None if selector is None else Assignment(dense_method(), "exempt", describe(selector))

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is not None:
            return assignment
        selector, method = matching(self.high_precision, spec), self.high_precision_method(spec)
        if selector is not None and method is not None:
            return Assignment(method, "high_precision", describe(selector))
        return Assignment(self.method(spec), "compressed", self.name)


def dense_method() -> CodecPair:
    """Exempt tensors: float32 through the shared messages."""
    stateful = PlainCodec(DenseCodec("float32"))
    return CodecPair(stateful, stateful)


def assign_all(compressor: Compressor, specs: Sequence[TensorSpec]) -> Mapping[str, Assignment]:
    return {spec.name: compressor.assign(spec) for spec in specs}
