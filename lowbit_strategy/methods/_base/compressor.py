"""A *compressor* is the configuration that users write. It gives each parameter its method.

There are two kinds of methods. A `CodecPair` has one codec per hop, and all pairs of a bucket share the same two
exchanges. A `Reducer` does its own communication, as sparse, low-rank and whole-model methods do.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch

from lowbit_strategy.codecs.base import DenseCodec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.selectors import Selector, matching, reason_of, validate_selectors
from lowbit_strategy.options.configuration import configuration

AssignmentKind = Literal["compressed", "high_precision", "exempt"]
DENSE = CodecPair(DenseCodec("float32"))  # for exempt tensors: float32 in the shared messages

# Stands for a model's parameters before they are known. It is big enough that headers and padding do not matter, and a
# matrix, so that low-rank methods compress it.
REFERENCE = TensorSpec("reference.weight", (1024, 1024))


class Assignment(NamedTuple):
    """The method of one parameter, and the reason. `of_part`: it differs from that of the whole parameter, because one
    rank's part is too small.
    """

    method: Method
    kind: AssignmentKind
    reason: str
    of_part: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the whole parameter is sent as float32; the same for all of its parts."""
        return self.method == DENSE and not self.of_part


@configuration
class Compressor(ABC):
    """A configuration that gives every parameter its method.

    Args:
        exempt: Parameters that stay dense: names with wildcards (``"*.gate.*"``), the predicates ``"@vector"``
            (fewer than two dims), ``"@small"``, ``"@embedding"``, ``"@head"``, or functions of a `TensorSpec`.
    """

    name: ClassVar[str]
    is_sparse: ClassVar[bool] = False  # whether only chosen elements are sent, for some parameters or phases

    exempt: tuple[Selector, ...] = ("@vector", "@small")

    def __post_init__(self) -> None:
        validate_selectors("exempt", self.exempt)

    @abstractmethod
    def method(self, spec: TensorSpec) -> Method:
        """The method of a parameter that is not exempt."""

    def check(self, specs: Sequence[TensorSpec]) -> None:  # noqa: B027 (most have nothing to check)
        """Raise a ValueError if the configuration does not suit a model with these parameters."""

    @property
    def momenta(self) -> frozenset[float]:
        """All momenta that methods apply to parameters, in all phases.

        If there are several, no momentum of the optimizer suits all parameters.
        """
        return frozenset({0.0})

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that momentum is applied only once. Adapters call this with each optimizer of the model.

        Raises:
            ValueError: The compressor applies different momenta to different parameters or phases, or it and the
                optimizer both apply momentum.
        """
        momenta = self.momenta
        if not any(momenta):
            return
        if len(momenta) > 1:
            values = " and ".join(f"{momentum:g}" for momentum in sorted(momenta))
            raise ValueError(
                f"the compressor applies momentum {values} to different parameters or phases, so no setting of the"
                " optimizer suits all of them: give DGC momentum=0 and leave momentum to the optimizer, or use DGC for"
                " all parameters with its own warm-up (warmup_steps) instead of WarmUp"
            )
        (momentum,) = momenta
        for number, group in enumerate(optimizer.param_groups):
            if group.get("momentum"):
                raise ValueError(
                    f"momentum is applied twice: {momentum:g} by the compressor and {group['momentum']:g} by"
                    f" {type(optimizer).__name__} (parameter group {number}); set the optimizer's momentum to 0, or the"
                    " compressor's"
                )
        if any("betas" in group for group in optimizer.param_groups):
            warnings.warn(
                f"the compressor applies momentum {momentum:g} and {type(optimizer).__name__} averages gradients"
                " itself: gradients are smoothed twice. Give DGC momentum=0",
                stacklevel=2,
            )

    def phase(self, step_index: int) -> Compressor:
        """The configuration in force after `step_index` optimizer steps: itself, unless it has phases."""
        return self

    def exempted(self, spec: TensorSpec) -> Assignment | None:
        """The dense method, for an exempt parameter."""
        selector = matching(self.exempt, spec)
        return None if selector is None else Assignment(DENSE, "exempt", reason_of(selector))

    def assign(self, spec: TensorSpec) -> Assignment:
        return self.exempted(spec) or Assignment(self.method(spec), "compressed", self.name)


@configuration
class TwoPrecisionCompressor(Compressor):
    """A compressor with a second method of more bits, for parameters that cause much of the error.

    Args:
        high_precision: Parameters that get more bits, chosen like `exempt`, which takes precedence.
        high_precision_bits: Bits per code of these parameters.
    """

    high_precision: tuple[Selector, ...] = ("@embedding", "@head")
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_selectors("high_precision", self.high_precision)

    @abstractmethod
    def high_precision_method(self, spec: TensorSpec) -> Method:
        """The method of a parameter of `high_precision`."""

    def assign(self, spec: TensorSpec) -> Assignment:
        selector = matching(self.high_precision, spec)
        if selector is None or self.exempted(spec) is not None:
            return super().assign(spec)
        return Assignment(self.high_precision_method(spec), "high_precision", reason_of(selector))


@configuration
class ReducingCompressor(Compressor, Reducer):
    """A configuration that is itself the method of its parameters, with `reduce` as well as options."""

    def method(self, spec: TensorSpec) -> Method:
        return self


def assign_all(compressor: Compressor, specs: Sequence[TensorSpec]) -> Mapping[str, Assignment]:
    """The assignment of each parameter. A part gets that of its whole parameter."""
    return {
        spec.name: compressor.assign(spec)
        if spec.whole_shape is None
        else assignment_for_part(compressor.assign(spec.whole), spec)
        for spec in specs
    }


def assignment_for_part(assignment: Assignment, spec: TensorSpec) -> Assignment:
    """The assignment of a part, given that of its whole parameter."""
    if spec.whole_shape is None or assignment.method.serves(spec):
        return assignment
    return Assignment(DENSE, "exempt", "the part that one rank reduces is too small", of_part=True)
