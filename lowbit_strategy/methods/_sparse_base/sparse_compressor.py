"""What configurations of sparse methods share, among them residuals of one or two bytes per parameter.

A residual grows until its element is sent, so a step's increment is far smaller than the residual: rounding to the
nearest value would lose it. Stochastic rounding keeps it on average.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import Codec
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.stateful_codec import StateTensors, StepContext
from lowbit_strategy.kernels.reference import blocks
from lowbit_strategy.kernels.reference.rng import RESIDUAL_STREAM, dither, stream_key
from lowbit_strategy.kernels.segments import CACHE_ELEMENTS
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.method import Method, read_residual
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View, WrappedReducer
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods._sparse_base.sparse_reducer import Values, check_density, value_codec
from lowbit_strategy.options.configuration import configuration

ResidualDtype = Literal["float32", "bfloat16", "int8"]
_BLOCK = 128


def compact(reducer: Reducer, residual: ResidualDtype) -> Reducer:
    """The same method with a residual of that type."""
    return reducer if residual == "float32" else CompactResidualReducer(inner=reducer, residual=residual)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompactResidualReducer(WrappedReducer):
    """Any sparse method: its residual is float32 during the reduction, and rounded stochastically afterwards.

    Args:
        inner: The method.
        residual: ``bfloat16``, or ``int8`` with one bfloat16 scale per 128 elements.
    """

    inner: Reducer
    residual: ResidualDtype

    @property
    def label(self) -> str:
        return f"{self.inner.label}, {self.residual} residual"

    @property
    def temporary_nbytes(self) -> float:
        return self.inner.temporary_nbytes + 1.5

    def continues(self, earlier: Method) -> bool:
        return (
            isinstance(earlier, CompactResidualReducer)
            and earlier.residual == self.residual
            and self.inner.continues(earlier.inner)
        )

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        state = self.inner.init(specs, device)
        for tensors in state.values():
            if "residual" not in tensors:
                continue
            if self.residual == "bfloat16":
                tensors["residual"] = tensors["residual"].bfloat16()
            else:
                num_blocks = -(-tensors["residual"].numel() // _BLOCK)
                tensors["residual"] = torch.zeros(num_blocks * _BLOCK, dtype=torch.int8, device=device)
                tensors["residual_scale"] = torch.zeros(num_blocks, dtype=torch.bfloat16, device=device)
        return state

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        opened: ReducerState = dict(state)
        before: StateTensors = {}
        for view in views:
            name = view.spec.name
            if (values := read_residual(state.get(name, {}))) is not None:
                before[name] = values[: view.spec.numel]
                opened[name] = {**state[name], "residual": before[name].clone()}
        yield from self.inner.reduce(views, opened, comm, step)
        for name, old in before.items():
            residual = opened[name]["residual"]
            if not torch.equal(residual, old):  # an unchanged residual is not rounded again
                self._store_(state[name], residual, stream_key(step.seed, zlib.crc32(name.encode()), RESIDUAL_STREAM))

    def _store_(self, tensors: StateTensors, values: Tensor, key: int) -> None:
        for at in range(0, values.numel(), CACHE_ELEMENTS):
            part = values[at : at + CACHE_ELEMENTS]
            if self.residual == "bfloat16":
                tensors["residual"][at : at + part.numel()] = round_to_bfloat16(part, at, key)
                continue
            padded_KB = torch.nn.functional.pad(part, (0, -part.numel() % _BLOCK)).view(-1, _BLOCK)
            noise_KB = dither(at, padded_KB.numel(), key, values.device).view_as(padded_KB)
            codes_KB, scale_K = blocks.quantize_residual(padded_KB, noise_KB)
            tensors["residual"][at : at + padded_KB.numel()] = codes_KB.view(-1)
            tensors["residual_scale"][at // _BLOCK : at // _BLOCK + scale_K.numel()] = blocks.to_bfloat16(scale_K)


def round_to_bfloat16(x: Tensor, first: int, key: int) -> Tensor:
    """Stochastic rounding: 16 random bits are added below those that stay.

    Args:
        x: float32 [N], finite; saturates.
        first: Index of its first element in the stream of random numbers.
        key: Of the stream of random numbers.
    """
    noise = ((dither(first, x.numel(), key, x.device) + 0.5) * 65536.0).to(torch.int32)
    bits = x.contiguous().view(torch.int32) + noise
    rounded = (bits & -65536).view(torch.float32)
    return torch.where(rounded.isfinite(), rounded, x.sign() * torch.finfo(torch.bfloat16).max).to(torch.bfloat16)


@configuration
class SparseCompressor(Compressor):
    """Configurations of sparse methods.

    Args:
        density: Share of the elements that is sent, in (0, 1]. Smaller: fewer bytes, staler elements.
        values: How values travel: ``float32``, ``bfloat16``, ``int8`` to ``int2`` (blocks with a scale) or any codec.
            Rounding errors stay in the residual. A position costs 2 more bytes.
        residual: ``float32``: 4 bytes per parameter on every rank; ``bfloat16``: 2; ``int8``: 1, with a scale per 128
            elements. The smaller ones are rounded stochastically: noise, but no bias.
    """

    is_sparse: ClassVar[bool] = True
    approaches_mean: ClassVar[bool] = False  # not within the steps of the shared tests

    density: float = 0.01
    values: Values | Codec = "float32"
    residual: ResidualDtype = "float32"

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_density(self.density)

    @property
    def codec(self) -> Codec:
        """Encodes the values."""
        return value_codec(self.values)

    @abstractmethod
    def reducer(self, spec: TensorSpec) -> Reducer:
        """The method of a parameter, with its residual in float32."""

    def method(self, spec: TensorSpec) -> Method:
        return compact(self.reducer(spec), self.residual)

    def conserving(self) -> SparseCompressor:
        return replace(self, residual="float32")
