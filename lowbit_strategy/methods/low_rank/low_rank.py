"""What low-rank methods share: parameters as matrices, and which of them are worth two thin ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit_strategy.collectives.stateful_codec import StateTensors
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, dense_method
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a parameter seen as a matrix: first dim, all others."""
    rows = spec.shape[0] if spec.shape else 1
    return rows, spec.numel // rows if rows else 0


def random_factor(spec: TensorSpec, dim: int, rank: int, seed: int) -> Tensor:
    """Normal numbers, a parameter's own, the same on all ranks: float32 [rows, rank], or [columns, rank] for dim 1."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()) ^ seed)
    return torch.randn(matrix_shape(spec)[dim], rank, generator=generator, dtype=torch.float32)


def keep_factor_(factor: Tensor, mean: Tensor) -> None:
    """The mean becomes the next step's factor; a column that has vanished or is not finite stays what it was."""
    usable = mean.isfinite().all(0) & (mean != 0).any(0)
    factor.copy_(torch.where(usable, mean, factor))


def keep_error_(residual_N: Tensor, error: Tensor) -> None:
    """The error becomes the residual where it is finite."""
    error_N = error.reshape(-1)
    residual_N.copy_(torch.where(error_N.isfinite(), error_N, residual_N))


def observe_(view: View, compensated: Tensor, sent: Tensor) -> None:
    """Fill in what monitors asked for. Call before the mean is written, perhaps over the gradient."""
    if view.compensated is not None:
        view.compensated.copy_(compensated.reshape(-1))
    if view.sent is not None:
        view.sent.copy_(sent.reshape(-1))


@dataclass(frozen=True, kw_only=True, slots=True)
class LowRankReducer(Reducer):
    """Sends two thin matrices in the place of each parameter."""

    rank: int

    def serves(self, spec: TensorSpec) -> bool:
        return self.rank <= min(matrix_shape(spec))

    def fresh(self, spec: TensorSpec, device: torch.device) -> StateTensors:
        """The state of one parameter at the start."""
        return {}

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        for spec in specs:
            if not self.serves(spec):
                rows, columns = matrix_shape(spec)
                raise ValueError(
                    f"rank {self.rank} is larger than {spec.name} allows, a matrix of {rows} x {columns}: choose a rank"
                    f" of at most {min(rows, columns)} or exempt it"
                )
        return {spec.name: self.fresh(spec, device) for spec in specs}


@configuration
class LowRankCompressor(Compressor):
    """Configurations of low-rank methods.

    Args:
        rank: Of the approximation.
        min_compression_rate: A parameter with ``(n + m) * rank * min_compression_rate >= n * m`` stays dense.
        epsilon: Relative, added to norms in the orthonormalisation.
    """

    rank: int = 4
    min_compression_rate: float = 2.0
    epsilon: float = 1e-8
    high_precision: tuple[Selector, ...] = ()

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_positive("rank", self.rank)
        if not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be positive, got {self.min_compression_rate!r}")
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon must not be negative, got {self.epsilon!r}")

    def pays(self, spec: TensorSpec) -> bool:
        """Whether two thin matrices are enough smaller than the parameter."""
        rows, columns = matrix_shape(spec)
        is_smaller = (rows + columns) * self.rank * self.min_compression_rate < rows * columns
        return is_smaller and self.rank <= min(rows, columns)

    def check(self, specs: Sequence[TensorSpec]) -> None:
        candidates = [spec for spec in specs if self.exempted(spec) is None]
        largest = max((min(matrix_shape(spec)) for spec in candidates), default=self.rank)
        if self.rank > largest:
            raise ValueError(
                f"rank {self.rank} is larger than every matrix of this model: choose a rank of at most {largest},"
                " better a tenth of that"
            )

    def assign(self, spec: TensorSpec) -> Assignment:
        if (assignment := self.exempted(spec)) is not None:
            return assignment
        if not self.pays(spec):
            return Assignment(dense_method(), "exempt", f"rank {self.rank} would not make it much smaller")
        return Assignment(self.method(spec), "compressed", self.name)
