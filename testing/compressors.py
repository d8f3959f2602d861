"""The smallest compressors with phases, and with rules by parameter."""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.options.configuration import configuration


@configuration
class Phased(Compressor):
    """`first` for some steps, then `later`."""

    name: ClassVar[str] = "phased"

    later: Compressor
    steps: int
    first: Compressor = field(default_factory=Dense)

    def phase(self, step_index: int) -> Compressor:
        return self.first if step_index < self.steps else self.later

    def assign(self, spec: TensorSpec) -> Assignment:
        return self.later.assign(spec)

    def method(self, spec: TensorSpec) -> Method:
        return self.later.method(spec)


@configuration
class ByName(Compressor):
    """Compressors by parameter; others are sent as they are."""

    name: ClassVar[str] = "by name"

    chosen: tuple[tuple[str, Compressor], ...]

    def assign(self, spec: TensorSpec) -> Assignment:
        return dict(self.chosen).get(spec.name, Dense()).assign(spec)

    def method(self, spec: TensorSpec) -> Method:
        return self.assign(spec).method
