"""Compressors that change what another one does."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec, StepContext, contracts
from lowbit_strategy.collectives.comm import LocalComm, wait_for_all
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import REFERENCE, Assignment, Compressor
from lowbit_strategy.methods._base.method import Method
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.composed import Composed
from lowbit_strategy.options.configuration import configuration

CodecOrReducer = TypeVar("CodecOrReducer", Codec, Reducer)


@configuration
class Wrapper(Composed):
    """Changes the methods that `compressor` gives; what that one exempts stays exempt.

    Args:
        compressor: The wrapped one.

    Raises:
        ValueError: The wrapped compressor cannot be wrapped.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        self.method(REFERENCE)  # what cannot be wrapped is refused now, not when training starts

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


def contracting(part: CodecOrReducer) -> CodecOrReducer:
    """The nearest form of a codec or a reducer, which feedback can do with.

    Raises:
        ValueError: Its error can be larger than its input: a residual would grow with every step.
    """
    nearest = part.nearest()
    if not _contracts(nearest):
        advice = "use smaller blocks, more bits or another compressor"
        if isinstance(part, Reducer):
            advice = "use it without feedback (for random-k: RandomK(scale=False), which has feedback of its own)"
        raise ValueError(
            f"{part.label!r} can err by more than its input, so what has not been sent would grow with every step:"
            f" {advice}"
        )
    return nearest


@functools.cache
def _contracts(part: Codec | Reducer) -> bool:
    """A reducer is tried on one rank."""
    if isinstance(part, Codec):
        return part.contracts
    size = 1024
    spec, comm = TensorSpec("probe", (32, size // 32)), LocalComm()

    def sent(x: Tensor) -> Tensor:
        result = torch.zeros_like(x)
        view = ParamView(spec, 1, size, x=x.clone(), out=torch.zeros_like(x), sent=result)
        state = part.init([spec], x.device)
        wait_for_all(part.reduce([view], state, comm, StepContext(0, 0, 0)))
        return result

    return contracts(sent, size)
