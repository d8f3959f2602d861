"""Two shared scales: elements use the finer one if it fits on all ranks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.integers import pack_bits, unpack_bits
from lowbit_strategy.methods.zoo.sharedscale import SharedScale, SharedScaleReducer, SharedViews, all_of_bits
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiScaleReducer(SharedScaleReducer):
    """`SharedScaleReducer` with two scales; `ratio` is their quotient."""

    ratio: int

    temporary_nbytes: ClassVar[float] = 33.0

    def _scale(self, shared: SharedViews, norm_K1: Tensor) -> Generator[Pending, None, Tensor]:
        """One bit per element and direction says where the finer scale fits on all ranks."""
        rows_WN = shared.rows(shared.h_KB.abs() * self.ratio <= norm_K1)
        numel = rows_WN.shape[1]
        padded = torch.nn.functional.pad(rows_WN, (0, -numel % 8))
        agreed = yield from all_of_bits(pack_bits(padded), shared.comm)
        is_fine_KB = shared.unrows(unpack_bits(agreed)[:, :numel])
        return torch.where(is_fine_KB, norm_K1 / (self.limit * self.ratio), norm_K1 / self.limit)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        where_it_fits = 2
        return where_it_fits + SharedScaleReducer.num_messages(self, specs, world_size)

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        bits = 2 * (world_size - 1) * -(-spec.row_numel(world_size, 1) // 8)
        return bits + SharedScaleReducer.wire_nbytes(self, spec, world_size)


@configuration
class MultiScale(SharedScale):
    """`SharedScale` with a second step, 2**finer_bits times finer, for elements that are small on every rank.

    With ``s = 2**(bits-1) - 1`` and ``r = 2**finer_bits``:

    1. all ranks agree on ``w = max over ranks of max|g|`` of each block
    2. all ranks agree, one bit per element and direction, where ``|g| <= w / r`` on every rank: there the step is
       ``w / (s r)``, elsewhere ``w / s``
    3. every rank rounds to integers in [-s, s] at random, without bias; they are summed exactly
    4. the mean is the sum times the step over W

    Args:
        bits: Per code, 2 to 8; the agreement takes two more.
        finer_bits: log2 of the quotient of the two steps, 1 to 8.
        block_size: Elements that share w, a power of two.
        high_precision_bits: Per code of embeddings and output heads, which have one scale.

    References:
        arXiv 2109.12497, 2021, its multi-scale quantizer: sums are exact only where all ranks use the same step.
    """

    name: ClassVar[str] = "multiscale"

    finer_bits: int = 3

    def __post_init__(self) -> None:
        SharedScale.__post_init__(self)
        if not 1 <= self.finer_bits <= 8:
            raise ValueError(f"finer_bits must be an integer from 1 to 8, got {self.finer_bits!r}")

    def method(self, spec: TensorSpec) -> MultiScaleReducer:
        ratio = 2**self.finer_bits
        title = f"two shared scales 1:{ratio}"
        return MultiScaleReducer(limit=2 ** (self.bits - 1) - 1, ratio=ratio, block_size=self.block_size, title=title)
