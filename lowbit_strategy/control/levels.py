"""Comparing configurations: their bytes, their order, a few words for each, and one compressor made of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Named:
    """A selector of parameters by their names, however many there are."""

    names: frozenset[str]
    label: ClassVar[str] = "chosen by the controller"

    def __call__(self, spec: TensorSpec) -> bool:
        return spec.name in self.names


def per_parameter(levels: Sequence[Compressor], choice: Mapping[str, int]) -> Partition:
    """One of `levels` for each parameter; those that `choice` does not name get the first."""
    names = {at: frozenset(name for name, chosen in choice.items() if chosen == at) for at in range(1, len(levels))}
    return Partition(rules=tuple((Named(each), levels[at]) for at, each in names.items() if each), default=levels[0])
