"""Compressors made of another one: what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from lowbit_strategy.collectives.stateful_codec import StatefulCodec
from lowbit_strategy.methods._base.compressor import Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.tensor_spec import REFERENCE, TensorSpec
from lowbit_strategy.options.configuration import configuration


@configuration
class Wrapper(Compressor):
    """Changes the methods that `compressor` gives; what that one exempts stays exempt.

    Args:
        compressor: The wrapped one.
        exempt: Parameters that are exempt besides.
        high_precision: Not used: the wrapped compressor decides what gets high precision.

    Raises:
        ValueError: The wrapped compressor cannot be wrapped.
    """

    compressor: Compressor
    exempt: tuple[Selector, ...] = ()
    high_precision: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        self.method(REFERENCE)  # what cannot be wrapped is refused now, not when training starts

    @property
    def is_sparse(self) -> bool:  # type: ignore[override]
        return self.compressor.is_sparse

    @property
    def approaches_mean(self) -> bool:  # type: ignore[override]
        return self.compressor.approaches_mean

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is not None:
            return assignment
        inner = self.compressor.assign(spec)
        return inner if inner.kind == "exempt" else inner._replace(method=self.wrap(inner.method))

    def method(self, spec: TensorSpec) -> Method:
        return self.wrap(self.compressor.method(spec))

    @property
    def momenta(self) -> frozenset[float]:
        return self.compressor.momenta

    def check(self, specs: Sequence[TensorSpec]) -> None:
        self.compressor.check(specs)

    def phase(self, step_index: int) -> Compressor:
        inner = self.compressor.phase(step_index)
        return self if inner == self.compressor else replace(self, compressor=inner)

    def conserving(self) -> Compressor:
        return replace(self, compressor=self.compressor.conserving())

    def wrap(self, method: Method) -> Method:
        return method.transform(self.wrap_codec, self.wrap_reducer)

    @abstractmethod
    def wrap_codec(self, stateful: StatefulCodec) -> StatefulCodec: ...

    @abstractmethod
    def wrap_reducer(self, reducer: Reducer) -> Reducer: ...
