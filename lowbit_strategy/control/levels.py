"""Comparing configurations: their bytes, their order, a few words for each, and one compressor made of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import ClassVar

from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods._base.tensor_spec import REFERENCE, TensorSpec
from lowbit_strategy.options.configuration import configuration

_REFERENCE_WORLD_SIZE = 4
_STRENGTHS = ("bits", "density", "rank")


def level_nbytes(level: Compressor, spec: TensorSpec, world_size: int, *, scatter: bool = False) -> int:
    """Bytes one rank sends to others for one reduction of `spec`, exempt or not, under the level."""
    return level.assign(spec).method.wire_nbytes(spec, world_size, scatter=scatter)


def reference_nbytes(level: Compressor) -> int:
    """Bytes for a matrix of 1024 x 1024 that is neither exempt nor of high precision, over four ranks."""
    return level.method(REFERENCE).wire_nbytes(REFERENCE, _REFERENCE_WORLD_SIZE, scatter=False)


def check_order(levels: Sequence[Compressor], names: Sequence[str]) -> None:
    """Each level must send fewer bytes than the one before it.

    Raises:
        ValueError: One does not.
    """
    sizes = [reference_nbytes(level) for level in levels]
    for at in range(1, len(levels)):
        if sizes[at] >= sizes[at - 1]:
            raise ValueError(
                f"{names[at]} must compress more than {names[at - 1]}, but {describe(levels[at])} sends {sizes[at]:,}"
                f" bytes where {describe(levels[at - 1])} sends {sizes[at - 1]:,}: swap them, or change their options"
            )


def describe(level: Compressor) -> str:
    """The configuration in a few words: its name, how strong it is, and what differs from the defaults."""
    options = []
    for entry in dataclasses.fields(level):
        value = getattr(level, entry.name)
        if entry.name in _STRENGTHS or (entry.name not in ("exempt", "high_precision") and value != entry.default):
            options.append(f"{entry.name}={value:.6g}" if isinstance(value, float) else f"{entry.name}={value!r}")
    return f"{level.name}({', '.join(options)})"


def labels(levels: Sequence[Compressor]) -> tuple[str, ...]:
    """A description for each level; numbered where two would read the same."""
    texts = [describe(level) for level in levels]
    return tuple(text if texts.count(text) == 1 else f"{text} #{at}" for at, text in enumerate(texts))


@configuration
class PerParameter(Compressor):
    """Several configurations, one of them chosen for each parameter; exemptions are each configuration's own.

    Args:
        levels: Configurations.
        choice: Parameter name and index into `levels`. Parameters that are not named get the first.
    """

    name: ClassVar[str] = "per_parameter"

    levels: tuple[Compressor, ...]
    choice: tuple[tuple[str, int], ...] = ()
    exempt: tuple[Selector, ...] = ()
    high_precision: tuple[Selector, ...] = ()
    _index: Mapping[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        if not self.levels:
            raise ValueError("levels must have at least one configuration")
        object.__setattr__(self, "_index", dict(self.choice))

    @classmethod
    def of(cls, levels: Sequence[Compressor], choice: Mapping[str, int]) -> PerParameter:
        return cls(levels=tuple(levels), choice=tuple(sorted(choice.items())))

    def check(self, specs: Sequence[TensorSpec]) -> None:
        for level in self.levels:  # each may be chosen for any of them
            level.check(specs)

    def at(self, step_index: int) -> Compressor:
        levels = tuple(level.at(step_index) for level in self.levels)
        return self if levels == self.levels else dataclasses.replace(self, levels=levels)

    def level(self, spec: TensorSpec) -> Compressor:
        return self.levels[self._index.get(spec.name, 0)]

    def method(self, spec: TensorSpec) -> Method:
        return self.level(spec).method(spec)

    def high_precision_method(self, spec: TensorSpec) -> Method | None:
        return self.level(spec).high_precision_method(spec)

    def assign(self, spec: TensorSpec) -> Assignment:
        return self.level(spec).assign(spec)
