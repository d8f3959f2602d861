"""Different compressors for different parameters, or for the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import ClassVar

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import (
    Assignment,
    Compressor,
    Selector,
    check_positive,
    describe,
    matching,
    validate_selectors,
)
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.options.configuration import configuration

Rule = tuple[Selector, Compressor]


@configuration
class Partition(Compressor):
    """The first rule whose selector matches a parameter gives its compressor; all others get `default`.

    Each compressor decides which of its parameters are exempt, and which get high precision.

    Args:
        rules: Pairs of a selector (a name with wildcards, a predicate, a function; see `Compressor`) and a compressor.
        default: For all other parameters.
        exempt: More exempt parameters; they take precedence over the rules.
        high_precision: Not used: the chosen compressor decides.

    Raises:
        ValueError: A rule is not a selector and a compressor.
    """

    name: ClassVar[str] = "partition"

    rules: tuple[Rule, ...] = ()
    default: Compressor = field(default_factory=LoCo)
    exempt: tuple[Selector, ...] = ()
    high_precision: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        validate_selectors("rules", [selector for selector, _ in self.rules])

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self.default.is_sparse or any(compressor.is_sparse for _, compressor in self.rules)

    @property
    def approaches_mean(self) -> bool:  # type: ignore[override]
        return self.default.approaches_mean and all(compressor.approaches_mean for _, compressor in self.rules)

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is not None:
            return assignment
        for selector, compressor in self.rules:
            if matching([selector], spec) is not None:
                inner = compressor.assign(spec)
                return inner._replace(reason=f"{inner.reason}; {describe(selector)}")
        return self.default.assign(spec)

    @property
    def momenta(self) -> frozenset[float]:
        return self.default.momenta.union(*(compressor.momenta for _, compressor in self.rules))

    def check(self, specs: Sequence[TensorSpec]) -> None:
        remaining = [spec for spec in specs if self.exempted(spec) is None]
        for selector, compressor in self.rules:
            compressor.check([spec for spec in remaining if matching([selector], spec) is not None])
            remaining = [spec for spec in remaining if matching([selector], spec) is None]
        self.default.check(remaining)

    def method(self, spec: TensorSpec) -> Method:
        return self.assign(spec).method

    def phase(self, step_index: int) -> Compressor:
        rules = tuple((selector, compressor.phase(step_index)) for selector, compressor in self.rules)
        default = self.default.phase(step_index)
        return self if (rules, default) == (self.rules, self.default) else replace(self, rules=rules, default=default)

    def conserving(self) -> Partition:
        rules = tuple((selector, compressor.conserving()) for selector, compressor in self.rules)
        return replace(self, rules=rules, default=self.default.conserving())


@configuration
class WarmUp(Compressor):
    """`first` for `steps` optimizer steps, then `compressor`.

    Compression hurts most at the start, where gradients are largest and change fastest. The phases of `compressor`, if
    it has any, begin after the warm-up. Residuals are carried over.

    Args:
        compressor: After the warm-up.
        steps: Optimizer steps of the warm-up.
        first: During the warm-up; uncompressed by default.
        exempt, high_precision: Not used: the two compressors decide.

    Raises:
        ValueError: `steps` is not positive, or a field is not a compressor.
    """

    name: ClassVar[str] = "warmup"

    compressor: Compressor = field(default_factory=LoCo)
    steps: int = 100
    first: Compressor = field(default_factory=Dense)
    exempt: tuple[Selector, ...] = ()
    high_precision: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_positive("steps", self.steps)

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self.first.is_sparse or self.compressor.is_sparse

    @property
    def approaches_mean(self) -> bool:  # type: ignore[override]
        return self.compressor.approaches_mean

    @property
    def momenta(self) -> frozenset[float]:
        return self.first.momenta | self.compressor.momenta

    def check(self, specs: Sequence[TensorSpec]) -> None:
        self.first.check(specs)
        self.compressor.check(specs)

    def phase(self, step_index: int) -> Compressor:
        if step_index < self.steps:
            return self.first.phase(step_index)
        return self.compressor.phase(step_index - self.steps)

    def assign(self, spec: TensorSpec) -> Assignment:
        return self.compressor.assign(spec)

    def method(self, spec: TensorSpec) -> Method:
        return self.compressor.method(spec)

    def conserving(self) -> WarmUp:
        return replace(self, compressor=self.compressor.conserving(), first=self.first.conserving())
