"""Quantization with a shared scale: integers add up exactly."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.codecs.block import Rounding
from lowbit_strategy.codecs.packed import PART_NUMEL
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.kernels.integers import pack_integers, packed_nbytes, unpack_integers
from lowbit_strategy.kernels.reference.blocks import to_blocks, tree_sum
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, dither, stream_key
from lowbit_strategy.methods._base.compressor import Compressor, check_codes
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.options.configuration import configuration


def sum_integers(q_WN: Tensor, limit: int, comm: Comm, *, scatter: bool) -> Generator[Pending, None, Tensor]:
    """Reduce-scatter or all-reduce of integers.

    1. row r of every rank goes to rank r, packed as narrow as ``[-limit, limit]`` allows
    2. rank r adds them in int32
    3. all-reduce: the sums go to everyone, packed as narrow as ``[-W * limit, W * limit]`` allows, so that no world
       size overflows

    Args:
        q_WN: int32 [W, n] in ``[-limit, limit]``.
        limit: Largest magnitude.
        comm: Group.
        scatter: Stop after the second step.

    Returns:
        int32: the own row's sums [n] if `scatter`, else all rows' [W, n].
    """
    world_size, numel = q_WN.shape
    sent = pack_integers(q_WN, limit)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent)
    total_N = unpack_integers(received, numel, limit).sum(0, dtype=torch.int32)
    if scatter:
        return total_N
    packed_sum = pack_integers(total_N[None], world_size * limit)[0]
    gathered = torch.empty(world_size, packed_sum.numel(), dtype=torch.uint8, device=packed_sum.device)
    yield comm.all_gather(gathered, packed_sum)
    return unpack_integers(gathered, numel, world_size * limit)


def sum_nbytes(numel: int, limit: int, world_size: int, *, scatter: bool) -> int:
    """Bytes a rank sends for rows of `numel` elements."""
    nbytes = packed_nbytes(numel, limit)
    if not scatter:
        nbytes += packed_nbytes(numel, world_size * limit)
    return nbytes * (world_size - 1)


def all_of_bits(bits_WB: Tensor, comm: Comm) -> Generator[Pending, None, Tensor]:
    """Bitwise AND over all ranks of packed bits, uint8 [W, B], on every rank."""
    received = torch.empty_like(bits_WB)
    yield comm.all_to_all(received, bits_WB)
    gathered = torch.empty_like(bits_WB)
    yield comm.all_gather(gathered, functools.reduce(torch.bitwise_and, received))
    return gathered


def clipped_absmax(h_KB: Tensor, counts_K: Tensor, clip_sigmas: float | None) -> Tensor:
    """float32 [K]: largest magnitude of zero-padded blocks after clipping at `clip_sigmas` standard deviations."""
    absmax_K = h_KB.abs().amax(-1)
    if clip_sigmas is None:
        return absmax_K
    unit_KB = torch.where(absmax_K[:, None] > 0, h_KB / absmax_K[:, None], 0.0)  # squares neither overflow nor vanish
    mean_K = tree_sum(unit_KB) / counts_K
    variance_K = (tree_sum(unit_KB * unit_KB) / counts_K - mean_K * mean_K).clamp(min=0.0)
    # Never clip below the mean: a block of equal elements has no deviation, but no outliers either.
    bound_K = torch.maximum(clip_sigmas * variance_K.sqrt(), mean_K.abs())
    return torch.minimum(absmax_K, bound_K * absmax_K)


_TINY = torch.finfo(torch.float32).tiny


class SharedViews:
    """The views of one reduction: gradients as flat float32, one norm for every block of every parameter.

    Blocks are counted from a parameter's first element in every layout and world size.
    """

    def __init__(self, views: Sequence[ParamView], comm: Comm, step: StepContext, block_size: int) -> None:
        self.views = [view for view in views if view.spec.numel]
        self.comm = comm
        self.step = step
        self.block_size = block_size
        self.sharded = any(view.spec.sharded for view in views)
        self.gradients = [view.flat().float() for view in self.views]

    def agree(self, norms: Sequence[Tensor]) -> Generator[Pending, None, list[Tensor]]:
        """The largest norm over ranks of every block; NaN if any rank's is not finite.

        NaN travels as infinity: backends differ in the maximum of NaN.
        """
        local = torch.cat(list(norms))
        agreed = torch.where(local.isfinite(), local, torch.inf)
        yield self.comm.all_reduce_max(agreed)
        agreed = torch.where(agreed.isinf(), torch.nan, agreed)
        return list(agreed.split([norm.numel() for norm in norms]))

    def spread(self, values_K: Tensor, index: int) -> Tensor:
        """From one number per block to one per element, flat [numel]."""
        return values_K.repeat_interleave(self.block_size)[: self.views[index].spec.numel]

    def round(
        self, index: int, scale_N: Tensor, limit: int, rounding: Rounding, bound_N: Tensor | None = None
    ) -> Tensor:
        """int32 [numel]: gradient over `scale_N` as a whole number; 0 where that is 0 or NaN.

        Args:
            index: Of the view.
            scale_N: Value of 1.
            limit: Largest magnitude of the result.
            rounding: ``stochastic``: without bias.
            bound_N: Clip the gradient to these magnitudes first; None: no clipping.
        """
        name, gradient = self.views[index].spec.name, self.gradients[index]
        key = stream_key(self.step.seed, zlib.crc32(name.encode()), CODE_STREAM)
        code_N = torch.empty(gradient.numel(), dtype=torch.int32, device=gradient.device)
        at_once = PART_NUMEL[gradient.is_cuda]
        for first in range(0, gradient.numel(), at_once):
            run = slice(first, first + at_once)
            y, scale = gradient[run], scale_N[run]
            if bound_N is not None:
                y = y.clamp(-bound_N[run], bound_N[run])
            usable = scale >= _TINY
            y = torch.where(usable, y, 0.0) / torch.where(usable, scale, 1.0)
            if rounding == "stochastic":
                y += dither(first, y.numel(), key, y.device)
            code_N[run] = y.round().clamp(-limit, limit)
        return code_N

    def rows(self, values: Sequence[Tensor]) -> Tensor:
        """[W, n]: every view's flat values, cut over the ranks."""
        world_size = self.comm.world_size
        if self.sharded:
            return torch.cat([view.rows(value) for view, value in zip(self.views, values, strict=True)], 1)
        flat = torch.cat(list(values))
        return torch.nn.functional.pad(flat, (0, -flat.numel() % world_size)).view(world_size, -1)

    def unrows(self, rows_WN: Tensor) -> list[Tensor]:
        """The inverse of `rows`: flat values of every view."""
        if self.sharded:
            parts = rows_WN.split([view.row_numel for view in self.views], 1)
            return [part.reshape(-1)[: view.spec.numel] for part, view in zip(parts, self.views, strict=True)]
        sizes = [view.spec.numel for view in self.views]
        return list(rows_WN.reshape(-1)[: sum(sizes)].split(sizes))

    def write_(self, totals: Tensor, scales: Sequence[Tensor]) -> None:
        """Every view's mean from the integer sums of `sum_integers` and their scales."""
        world_size, rank = self.comm.world_size, self.comm.rank
        if not self.sharded:
            for view, total, scale_N in zip(self.views, self.unrows(totals), scales, strict=True):
                view.out.copy_(total * scale_N / world_size)
            return
        own = totals.split([view.row_numel for view in self.views])
        for view, total, scale_N in zip(self.views, own, scales, strict=True):
            start, length = rank * view.row_numel, view.row_length(rank)
            torch.mul(total[:length], scale_N[start : start + length], out=view.out[:length])
            if length < view.row_numel:
                view.out[length:] = 0

    def observe_(self, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """For feedback and monitors: the gradient, and what the other ranks decode."""
        for view, gradient, code, scale_N in zip(self.views, self.gradients, codes, scales, strict=True):
            if view.compensated is not None:
                view.compensated.copy_(gradient)
            if view.sent is not None:
                view.sent.copy_(code * scale_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedScaleReducer(Reducer):
    """Stochastic integers in ``[-limit, limit]`` times a shared step, summed as integers.

    Args:
        limit: Largest code; 1 makes trits.
        block_size: Elements that share a scale.
        clip_sigmas: Clip each block's elements first, in standard deviations of this rank's block; None: no clipping.
        rounding: ``stochastic``: no bias; ``nearest``: least error.
        title: For reports.
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

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        shared = SharedViews(views, comm, step, self.block_size)
        if not shared.views:
            return
        norms = [self._norm(gradient) for gradient in shared.gradients]
        agreed = yield from shared.agree(norms)
        scales = yield from self._scales(shared, agreed)
        bounds = [None if self.clip_sigmas is None else shared.spread(norm_K, i) for i, norm_K in enumerate(norms)]
        codes = [shared.round(i, scale_N, self.limit, self.rounding, bounds[i]) for i, scale_N in enumerate(scales)]
        shared.observe_(codes, scales)
        totals = yield from sum_integers(shared.rows(codes), self.limit, comm, scatter=shared.sharded)
        shared.write_(totals, scales)

    def _scales(self, shared: SharedViews, agreed: Sequence[Tensor]) -> Generator[Pending, None, list[Tensor]]:
        """For every view the step of each element, from the common norms."""
        yield from ()
        return [shared.spread(norm_K / self.limit, i) for i, norm_K in enumerate(agreed)]

    def _norm(self, gradient_N: Tensor) -> Tensor:
        """float32 [K]: largest magnitude of each block after clipping; not finite if the block is not."""
        h_KB = to_blocks(gradient_N, self.block_size)
        if self.clip_sigmas is None:
            return h_KB.abs().amax(-1)
        counts_K = torch.full((h_KB.shape[0],), float(self.block_size), dtype=torch.float32, device=h_KB.device)
        counts_K[-1] -= h_KB.numel() - gradient_N.numel()
        norm_K = clipped_absmax(h_KB, counts_K, self.clip_sigmas)
        return torch.where(h_KB.isfinite().all(-1), norm_K, torch.inf)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 2 if specs[0].sharded else 3  # norms; codes, on one hop or two

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        numel = spec.row_numel(world_size, 1)
        codes = sum_nbytes(numel, self.limit, world_size, scatter=spec.sharded)
        norms = 2 * (world_size - 1) * -(-spec.numel // self.block_size) * 4 // world_size
        return codes + norms


@configuration
class SharedScale(Compressor):
    """All ranks round to the same grid, so that their integers can be summed exactly.

    With ``s = 2**(bits-1) - 1``:

    1. all ranks agree on ``w = max over ranks of max|g|`` of each block (an all-reduce of one float per block)
    2. every rank rounds ``g * s / w`` to integers in [-s, s] at random, without bias
    3. integers are summed exactly: `bits` per element to the owners, int32 there, and ``log2(2 W s + 1)`` bits per
       element from the owners (DDP)
    4. the mean is the sum times ``w / s / W``

    Nothing is quantized twice, so the downlink costs bits instead of error. A rank with small gradients is rounded on
    the grid of another rank's outliers.

    Args:
        bits: Per code, 2 to 8.
        block_size: Elements that share w, a power of two; a tensor in the publication.
        high_precision_bits: Per code of embeddings and output heads.

    References:
        arXiv 2109.12497, 2021, on quantizers for all-reduce: QSGD with a shared maximum norm.
    """

    name: ClassVar[str] = "sharedscale"

    bits: int = 4
    block_size: int = 512
    high_precision_bits: int = 8

    def __post_init__(self) -> None:
        Compressor.__post_init__(self)
        check_codes(self.block_size, bits=self.bits, high_precision_bits=self.high_precision_bits)

    def method(self, spec: TensorSpec) -> SharedScaleReducer:
        return SharedScaleReducer(limit=2 ** (self.bits - 1) - 1, block_size=self.block_size)

    def high_precision_method(self, spec: TensorSpec) -> SharedScaleReducer:
        bits = max(self.bits, self.high_precision_bits)
        return SharedScaleReducer(limit=2 ** (bits - 1) - 1, block_size=self.block_size)
