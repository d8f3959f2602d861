"""Two shared scales: an element uses the finer one where all ranks agree that it fits."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.block import Rounding
from lowbit_strategy.codecs.onebit import pack_bits, unpack_bits
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.integers import all_of_bits, sum_integers, sum_nbytes
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_bits, check_block_size
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View
from lowbit_strategy.methods._base.shared_scale_base import SharedViews, agreed_nbytes, row_numel
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.quantization.sharedscale import SharedScaleReducer
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class MultiScaleReducer(Reducer):
    """Fields as in `MultiScale`, bits as the largest code and the ratio of the two scales."""

    limit: int
    ratio: int
    block_size: int
    rounding: Rounding = "stochastic"

    fixed_size: ClassVar[bool] = True
    temporary_nbytes: ClassVar[float] = 33.0

    @property
    def label(self) -> str:
        return f"two shared scales 1:{self.ratio}, {2 * self.limit + 1} values, blocks of {self.block_size}"

    def nearest(self) -> MultiScaleReducer:
        return replace(self, rounding="nearest")

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return {}

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        shared = SharedViews(views, comm, step, self.block_size)
        if not shared.views:
            return
        norms = []
        for i in range(len(shared.views)):
            h_KB = shared.blocks(i)
            norms.append(torch.where(h_KB.isfinite().all(-1), h_KB.abs().amax(-1), torch.inf))
        agreed = yield from shared.agree(norms)
        widths = [shared.spread(norm_K, i) for i, norm_K in enumerate(agreed)]
        fits = [h.abs() * self.ratio <= width_N for h, width_N in zip(shared.gradients, widths, strict=True)]
        finer = yield from self._agree_where(shared, fits)
        scales = [
            torch.where(fine, width_N / (self.limit * self.ratio), width_N / self.limit)
            for fine, width_N in zip(finer, widths, strict=True)
        ]
        codes = [shared.round(i, scale_N, self.limit, self.rounding) for i, scale_N in enumerate(scales)]
        shared.observe_(codes, scales)
        totals = yield from sum_integers(shared.rows(codes), self.limit, comm, scatter=shared.scatter)
        shared.write_(totals, scales)

    def _agree_where(self, shared: SharedViews, fits: Sequence[Tensor]) -> Generator[Pending, None, list[Tensor]]:
        """Boolean, flat, for every view: where the finer scale fits on all ranks. One bit per element, twice."""
        rows_WN = shared.rows(fits)
        numel = rows_WN.shape[1]
        padded = torch.nn.functional.pad(rows_WN, (0, -numel % 8))
        agreed = yield from all_of_bits(pack_bits(padded), shared.comm)
        return shared.unrows(unpack_bits(agreed)[:, :numel])

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool) -> int:
        return 4 if scatter else 5  # norms; where the finer scale fits, twice; codes, on one hop or two

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        numel = row_numel(spec, world_size, scatter=scatter)
        bits = 2 * (world_size - 1) * -(-numel // 8)
        codes = sum_nbytes(numel, self.limit, world_size, scatter=scatter)
        return bits + codes + agreed_nbytes(spec, self.block_size, world_size)


@configuration
class MultiScale(Compressor):
    """As `SharedScale`, with a second step 2**finer_bits times finer for elements that are small on every rank.

    With ``s = 2**(bits-1) - 1`` and ``r = 2**finer_bits``:

    1. all ranks agree on ``w = max over ranks of max|g|`` of each block
    2. all ranks agree, one bit per element and direction, where ``|g| <= w / r`` on every rank: there the step is
       ``w / (s r)``, elsewhere ``w / s``
    3. every rank rounds to its integers in [-s, s] at random, without bias; they are summed exactly
    4. the mean is the sum times the step over W

    Args:
        bits: A code has so many, 2 to 8; two more go into the agreement.
        finer_bits: log2 of how much finer the second step is, 1 to 8.
        block_size: Elements that share w, a power of two.
        high_precision_bits: Codes of embeddings and output heads have so many, and one scale.
        exempt, high_precision: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        arXiv 2109.12497, 2021, its multi-scale quantiser: sums are exact only where all ranks use the same step.
    """

    name: ClassVar[str] = "multiscale"

    bits: int = 4
    finer_bits: int = 3
    block_size: int = 512
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_bits("bits", self.bits)
        check_bits("high_precision_bits", self.high_precision_bits)
        check_block_size(self.block_size)
        if not 1 <= self.finer_bits <= 8:
            raise ValueError(f"finer_bits must be an integer from 1 to 8, got {self.finer_bits!r}")

    def method(self, spec: TensorSpec) -> MultiScaleReducer:
        return MultiScaleReducer(limit=2 ** (self.bits - 1) - 1, ratio=2**self.finer_bits, block_size=self.block_size)

    def high_precision_method(self, spec: TensorSpec) -> SharedScaleReducer:
        bits = max(self.bits, self.high_precision_bits)
        return SharedScaleReducer(limit=2 ** (bits - 1) - 1, block_size=self.block_size)
