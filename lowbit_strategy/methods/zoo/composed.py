"""Compressors made of others, by parameter or by phase."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import field, replace
from typing import ClassVar

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.selectors import Selector, matching, reason_of, validate_selectors
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration

Rule = tuple[Selector, Compressor]


@configuration
class Composed(Compressor):
    """Base class of compressors made of others, which decide what is exempt and what gets high precision.

    Args:
        exempt: More exempt parameters.
    """

    exempt: tuple[Selector, ...] = ()

    @property
    @abstractmethod
    def parts(self) -> tuple[Compressor, ...]:
        """The other compressors."""

    @abstractmethod
    def with_parts(self, parts: Sequence[Compressor]) -> Compressor:
        """The same compressor made of `parts`, in their order."""

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return any(part.is_sparse for part in self.parts)

    @property
    def momenta(self) -> frozenset[float]:
        return frozenset().union(*(part.momenta for part in self.parts))

    def check(self, specs: Sequence[TensorSpec]) -> None:
        for part in self.parts:
            part.check(specs)

    def phase(self, step_index: int) -> Compressor:
        parts = tuple(part.phase(step_index) for part in self.parts)
        return self if parts == self.parts else self.with_parts(parts)


@configuration
class Partition(Composed):
    """The first rule whose selector matches a parameter gives its compressor; all others get `default`.

    Each compressor decides which of its parameters are exempt, and which get high precision.

    Args:
        rules: Pairs of a selector (a name with wildcards, a predicate, a function; see `Compressor`) and a compressor.
        default: Compressor of all other parameters.
        exempt: More exempt parameters; they take precedence over the rules.

    Raises:
        ValueError: A rule is not a selector and a compressor.
    """

    name: ClassVar[str] = "partition"

    rules: tuple[Rule, ...] = ()
    default: Compressor = field(default_factory=LoCo)

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        validate_selectors("rules", [selector for selector, _ in self.rules])

    @property
    def parts(self) -> tuple[Compressor, ...]:
        return (self.default, *(compressor for _, compressor in self.rules))

    def with_parts(self, parts: Sequence[Compressor]) -> Partition:
        default, *others = parts
        rules = tuple((selector, other) for (selector, _), other in zip(self.rules, others, strict=True))
        return replace(self, rules=rules, default=default)

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is not None:
            return assignment
        for selector, compressor in self.rules:
            if matching([selector], spec) is not None:
                inner = compressor.assign(spec)
                return inner._replace(reason=f"{inner.reason}; {reason_of(selector)}")
        return self.default.assign(spec)

    def check(self, specs: Sequence[TensorSpec]) -> None:
        remaining = [spec for spec in specs if self.exempted(spec) is None]
        for selector, compressor in self.rules:
            compressor.check([spec for spec in remaining if matching([selector], spec) is not None])
            remaining = [spec for spec in remaining if matching([selector], spec) is None]
        self.default.check(remaining)

    def method(self, spec: TensorSpec) -> Method:
        return self.assign(spec).method


@configuration
class WarmUp(Composed):
    """`first` for `steps` optimizer steps, then `compressor`.

    Compression hurts most at the start, where gradients are largest and change fastest. The phases of `compressor`, if
    it has any, begin after the warm-up. Residuals are carried over.

    Args:
        compressor: The compressor after the warm-up.
        steps: Optimizer steps of the warm-up.
        first: Compressor of the warm-up; uncompressed by default.

    Raises:
        ValueError: `steps` is not positive, or a field is not a compressor.
    """

    name: ClassVar[str] = "warmup"

    compressor: Compressor = field(default_factory=LoCo)
    steps: int = 100
    first: Compressor = field(default_factory=Dense)

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_positive("steps", self.steps)

    @property
    def parts(self) -> tuple[Compressor, ...]:
        return (self.first, self.compressor)

    def with_parts(self, parts: Sequence[Compressor]) -> WarmUp:
        first, compressor = parts
        return replace(self, first=first, compressor=compressor)

    def phase(self, step_index: int) -> Compressor:
        if step_index < self.steps:
            return self.first.phase(step_index)
        return self.compressor.phase(step_index - self.steps)

    def assign(self, spec: TensorSpec) -> Assignment:
        return self.compressor.assign(spec)

    def method(self, spec: TensorSpec) -> Method:
        return self.compressor.method(spec)
