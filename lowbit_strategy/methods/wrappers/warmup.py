"""A lighter compressor, or none, for the first steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import ClassVar

from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.quantization.dense import Dense
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.options.configuration import configuration


@configuration
class WarmUp(Compressor):
    """`first` for `steps` optimizer steps, then `compressor`.

    Gradients are largest and turn fastest at the start, which is where compression does harm. A compressor with phases
    of its own begins them after the warm-up. Residuals of `first` go on in `compressor`.

    Args:
        compressor: After the warm-up.
        steps: Its length in optimizer steps.
        first: During it; uncompressed by default.
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
