"""Code shared by low-rank methods: parameters as matrices, and the choice of those that two thin ones replace."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods._base.compressor import DENSE, Assignment, Compressor, ReducingCompressor
from lowbit_strategy.options.checks import check_positive
from lowbit_strategy.options.configuration import configuration


def matrix_shape(spec: TensorSpec) -> tuple[int, int]:
    """Rows and columns of a parameter seen as a matrix: first dim, all others."""
    rows = spec.shape[0] if spec.shape else 1
    return rows, spec.numel // rows if rows else 0


@configuration
class LowRankCompressor(ReducingCompressor):
    """Sends two thin matrices per parameter.

    Args:
        rank: Rank of the approximation. Bytes grow with it; 1 to 4 is usual.
        min_compression_rate: A parameter with ``(n + m) * rank * min_compression_rate >= n * m`` stays dense.
    """

    rank: int = 4
    min_compression_rate: float = 2.0

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_positive("rank", self.rank)
        if not self.min_compression_rate > 0:
            raise ValueError(f"min_compression_rate must be positive, got {self.min_compression_rate!r}")

    def pays(self, spec: TensorSpec) -> bool:
        """Whether two thin matrices are sufficiently smaller than the parameter."""
        rows, columns = matrix_shape(spec)
        is_smaller = (rows + columns) * self.rank * self.min_compression_rate < rows * columns
        return is_smaller and self.rank <= min(rows, columns)

    def random_factor(self, spec: TensorSpec, dim: int, seed: int) -> Tensor:
        """Normal random numbers, the same on all ranks: float32 [rows, rank], or [columns, rank] for dim 1."""
        generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()) ^ seed)
        return torch.randn(matrix_shape(spec)[dim], self.rank, generator=generator, dtype=torch.float32)

    @staticmethod
    def store_factor_(factor: Tensor, mean: Tensor) -> None:
        """Store the mean as the next step's factor; columns that are zero or not finite keep their old values."""
        usable = mean.isfinite().all(0) & (mean != 0).any(0)
        factor.copy_(torch.where(usable, mean, factor))

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
            return Assignment(DENSE, "exempt", f"rank {self.rank} would not make it much smaller")
        return Assignment(self.method(spec), "compressed", self.name)

    def serves(self, spec: TensorSpec) -> bool:
        return self.rank <= min(matrix_shape(spec))
