"""Quantisation with a scale that all ranks share: integers add up exactly."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.block import Rounding
from lowbit_strategy.codecs.ternary import clipped_absmax
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.integers import sum_integers, sum_nbytes
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.option_checks import check_bits, check_block_size
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState, View
from lowbit_strategy.methods._base.shared_scale_base import SharedViews, agreed_nbytes
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.options.configuration import configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedScaleReducer(Reducer):
    """Stochastic integers in ``[-limit, limit]`` times a shared step, summed as integers.

    Args:
        limit: Largest code; 1 makes trits.
        block_size: Elements that share a scale.
        clip_sigmas: Clip each block's elements at so many of this rank's standard deviations first; None does not.
        rounding: ``stochastic``: no bias; ``nearest``: least error.
        title: What reports call it.
    """

    limit: int
    block_size: int
    clip_sigmas: float | None = None
    rounding: Rounding = "stochastic"
    title: str = "shared scale"

    fixed_size: ClassVar[bool] = True
    temporary_nbytes: ClassVar[float] = 26.0

    @property
    def label(self) -> str:
        return f"{self.title}, {2 * self.limit + 1} values, blocks of {self.block_size}"

    def nearest(self) -> SharedScaleReducer:
        return replace(self, rounding="nearest")

    def reduce(self, views: Sequence[View], state: ReducerState, comm: Comm, step: StepContext) -> Iterator[Pending]:
        shared = SharedViews(views, comm, step, self.block_size)
        if not shared.views:
            return
        norms = [self._norm(shared.blocks(i), shared.views[i].spec) for i in range(len(shared.views))]
        agreed = yield from shared.agree(norms)
        scales = yield from self._scales(shared, agreed)
        bounds = [None if self.clip_sigmas is None else shared.spread(norm_K, i) for i, norm_K in enumerate(norms)]
        codes = [shared.round(i, scale_N, self.limit, self.rounding, bounds[i]) for i, scale_N in enumerate(scales)]
        shared.observe_(codes, scales)
        totals = yield from sum_integers(shared.rows(codes), self.limit, comm, scatter=shared.scatter)
        shared.write_(totals, scales)

    def _scales(self, shared: SharedViews, agreed: Sequence[Tensor]) -> Generator[Pending, None, list[Tensor]]:
        """For every view the step of each element, from the norms that all ranks have agreed on."""
        yield from ()
        return [shared.spread(norm_K / self.limit, i) for i, norm_K in enumerate(agreed)]

    def _norm(self, h_KB: Tensor, spec: TensorSpec) -> Tensor:
        """float32 [K]: largest magnitude of each block after clipping; not finite where the block is not."""
        counts_K = torch.full((h_KB.shape[0],), float(self.block_size), dtype=torch.float32, device=h_KB.device)
        counts_K[-1] -= h_KB.numel() - spec.numel
        norm_K = clipped_absmax(h_KB, counts_K, self.clip_sigmas)
        return torch.where(h_KB.isfinite().all(-1), norm_K, torch.inf)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int, *, scatter: bool) -> int:
        return 2 if scatter else 3  # norms; codes, on one hop or two

    def wire_nbytes(self, spec: TensorSpec, world_size: int, *, scatter: bool) -> int:
        numel = spec.cut(world_size, 1, scatter=scatter).row_numel
        codes = sum_nbytes(numel, self.limit, world_size, scatter=scatter)
        return codes + agreed_nbytes(spec, self.block_size, world_size)


@configuration
class SharedScale(Compressor):
    """All ranks round to the same grid, so that an integer sum is the sum of what they sent.

    With ``s = 2**(bits-1) - 1``:

    1. all ranks agree on ``w = max over ranks of max|g|`` of each block (an all-reduce of one float per block)
    2. every rank rounds ``g * s / w`` to integers in [-s, s] at random, without bias
    3. integers are summed exactly: `bits` per element to the owners, int32 there, and ``log2(2 W s + 1)`` bits per
       element from the owners (DDP), as wide as any world size needs
    4. the mean is the sum times ``w / s / W``

    Nothing is quantised twice, so the downlink costs bits instead of error. A rank with small gradients pays for
    another rank's outliers.

    Args:
        bits: A code has so many, 2 to 8.
        block_size: Elements that share w, a power of two; the publication has one per tensor.
        high_precision_bits: Codes of embeddings and output heads have so many.
        exempt, high_precision: Which parameters; see `Compressor`.

    Raises:
        ValueError: A field is out of range.

    References:
        arXiv 2109.12497, 2021, on quantisers that suit an all-reduce: QSGD with a maximum norm that all ranks share.
    """

    name: ClassVar[str] = "sharedscale"

    bits: int = 4
    block_size: int = 512
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_bits("bits", self.bits)
        check_bits("high_precision_bits", self.high_precision_bits)
        check_block_size(self.block_size)

    def method(self, spec: TensorSpec) -> SharedScaleReducer:
        return SharedScaleReducer(limit=2 ** (self.bits - 1) - 1, block_size=self.block_size)

    def high_precision_method(self, spec: TensorSpec) -> SharedScaleReducer:
        bits = max(self.bits, self.high_precision_bits)
        return SharedScaleReducer(limit=2 ** (bits - 1) - 1, block_size=self.block_size)
