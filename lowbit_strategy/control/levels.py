"""Comparing configurations: bytes, order, a short description, and one compressor made of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import REFERENCE, TensorSpec
from lowbit_strategy.methods.mixtures import Partition

_REFERENCE_WORLD_SIZE = 4
_STRENGTHS = ("bits", "density", "rank")


def reference_nbytes(level: Compressor) -> int:
    """Bytes for a matrix of 1024 x 1024 that is neither exempt nor of high precision, over four ranks."""
    return level.method(REFERENCE).wire_nbytes(REFERENCE, _REFERENCE_WORLD_SIZE, scatter=False)


def check_order(levels: Sequence[Compressor], names: Sequence[str]) -> None:
    """Each level must send fewer bytes than the one before it.

    Raises:
        ValueError: One does not.
    """
    sized = [(level, name, reference_nbytes(level)) for level, name in zip(levels, names, strict=True)]
    for (lighter, lighter_name, more), (heavier, heavier_name, fewer) in pairwise(sized):
        if fewer >= more:
            raise ValueError(
                f"{heavier_name} must compress more than {lighter_name}, but {describe(heavier)} sends {fewer:,}"
                f" bytes where {describe(lighter)} sends {more:,}: swap them, or change their options"
            )


def describe(level: Compressor) -> str:
    """Name, strength, and what differs from the defaults."""
    options = []
    for entry in dataclasses.fields(level):
        value = getattr(level, entry.name)
        if entry.name in _STRENGTHS or (entry.name not in ("exempt", "high_precision") and value != entry.default):
            options.append(f"{entry.name}={value:.6g}" if isinstance(value, float) else f"{entry.name}={value!r}")
    return f"{level.name}({', '.join(options)})"


def labels(levels: Sequence[Compressor]) -> tuple[str, ...]:
    """A description of each level, numbered where two would read the same."""
    texts = [describe(level) for level in levels]
    return tuple(text if texts.count(text) == 1 else f"{text} #{at}" for at, text in enumerate(texts))


@dataclass(frozen=True)
class Named:
    """Selects parameters by name."""

    names: frozenset[str]
    label: ClassVar[str] = "chosen by the controller"

    def __call__(self, spec: TensorSpec) -> bool:
        return spec.name in self.names


def per_parameter(levels: Sequence[Compressor], choice: Mapping[str, int]) -> Partition:
    """One of `levels` for each parameter; those that are not in `choice` get the first."""
    names = {at: frozenset(name for name, chosen in choice.items() if chosen == at) for at in range(1, len(levels))}
    return Partition(rules=tuple((Named(each), levels[at]) for at, each in names.items() if each), default=levels[0])
