"""Base class of compressors that modify another compressor."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import REFERENCE, Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.zoo.composed import Composed
from lowbit_strategy.options.configuration import configuration


@configuration
class Wrapper(Composed):
    """Changes the methods that `compressor` gives. What that compressor exempts stays exempt.

    Args:
        compressor: The wrapped one.

    Raises:
        ValueError: The wrapped compressor cannot be wrapped.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        self.method(REFERENCE)  # refuse what cannot be wrapped now, not when training starts

    @property
    def parts(self) -> tuple[Compressor, ...]:
        return (self.compressor,)

    def with_parts(self, parts: Sequence[Compressor]) -> Wrapper:
        return replace(self, compressor=parts[0])

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is not None:
            return assignment
        inner = self.compressor.assign(spec)
        return inner if inner.kind == "exempt" else inner._replace(method=self.wrap(inner.method))

    def method(self, spec: TensorSpec) -> Method:
        return self.wrap(self.compressor.method(spec))

    def wrap(self, method: Method) -> Method:
        if isinstance(method, CodecPair):
            return CodecPair(self.wrap_codec(method.uplink), self.wrap_codec(method.downlink))
        assert isinstance(method, Reducer)
        return self.wrap_reducer(method)

    @abstractmethod
    def wrap_codec(self, codec: Codec) -> Codec: ...

    @abstractmethod
    def wrap_reducer(self, reducer: Reducer) -> Reducer: ...
