"""What low-rank methods share: parameters as matrices, and which of them are worth two thin ones."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.methods._base.compressor import Assignment, Compressor, dense_method
from lowbit_strategy.methods._base.option_checks import check_positive
from lowbit_strategy.methods._base.parameter_selectors import Selector
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a parameter seen as a matrix: first dim, all others."""
    rows = spec.shape[0] if spec.shape else 1
    return rows, spec.numel // rows if rows else 0


def check_rank(rank: int, spec: TensorSpec) -> None:
    """Raises:
    ValueError: The parameter is smaller.
    """
    rows, columns = matrix_shape(spec)
    if rank > min(rows, columns):
        raise ValueError(
            f"rank {rank} is larger than {spec.name} allows, a matrix of {rows} x {columns}: choose a rank"
            f" of at most {min(rows, columns)} or exempt it"
        )


def random_q(spec: TensorSpec, rank: int, seed: int) -> Tensor:
    """float32 [columns, rank] on the CPU: normal, the same on all ranks, different for every parameter."""
    return _normal(spec, matrix_shape(spec)[1], rank, seed)


def random_p(spec: TensorSpec, rank: int, seed: int) -> Tensor:
    """float32 [rows, rank], likewise."""
    return _normal(spec, matrix_shape(spec)[0], rank, seed)


def _normal(spec: TensorSpec, length: int, rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()) ^ seed)
    return torch.randn(length, rank, generator=generator, dtype=torch.float32)


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def shaped_like(tensors: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class LowRankReducer(Reducer):
    """Sends two thin matrices in the place of each parameter. Subclasses are frozen dataclasses with these fields."""

    rank: int
    epsilon: float

    def serves(self, spec: TensorSpec) -> bool:
        return self.rank <= min(matrix_shape(spec))


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
        fits = self.rank <= min(rows, columns)
        return fits and (rows + columns) * self.rank * self.min_compression_rate < rows * columns

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
