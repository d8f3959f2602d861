"""Quantization with a scale that all ranks share, so that integers add up exactly."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.codecs.block import BlockCodec, Rounding
from lowbit_strategy.codecs.packed import PART_NUMEL, Packed
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.kernels.format import uniform
from lowbit_strategy.kernels.integers import BITS
from lowbit_strategy.kernels.reference.blocks import tree_sum
from lowbit_strategy.kernels.reference.rng import CODE_STREAM
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods._base.code_sizes import check_codes
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import TwoPrecisionCompressor
from lowbit_strategy.methods._base.reducer import Reducer, ReducerState
from lowbit_strategy.methods.zoo.integers import pack_integers, packed_nbytes, unpack_integers
from lowbit_strategy.options.configuration import configuration


def sum_integers(q_WN: Tensor, limit: int, comm: Comm, *, sharded: bool) -> Generator[Pending, None, Tensor]:
    """Reduce-scatter or all-reduce of integers.

    1. row r of every rank goes to rank r, packed as narrow as ``[-limit, limit]`` allows
    2. rank r adds them in int32
    3. all-reduce: the sums go to all ranks, packed as narrow as ``[-W * limit, W * limit]`` allows, so that no world
       size overflows

    Args:
        q_WN: int32 [W, n] in ``[-limit, limit]``.
        limit: Largest magnitude.
        comm: Ranks to sum over.
        sharded: Whether to stop after the second step.

    Returns:
        int32: the sums of this rank's row [n] if `sharded`, else all rows' [W, n].
    """
    world_size, numel = q_WN.shape
    sent = pack_integers(q_WN, limit)
    received = torch.empty_like(sent)
    yield comm.all_to_all(received, sent)
    total_N = unpack_integers(received, numel, limit).sum(0, dtype=torch.int32)
    if sharded:
        return total_N
    packed_sum = pack_integers(total_N[None], world_size * limit)[0]
    gathered = torch.empty(world_size, packed_sum.numel(), dtype=torch.uint8, device=packed_sum.device)
    yield comm.all_gather(gathered, packed_sum)
    return unpack_integers(gathered, numel, world_size * limit)


def sum_nbytes(numel: int, limit: int, world_size: int, *, sharded: bool) -> int:
    """Bytes a rank sends for rows of `numel` elements."""
    nbytes = packed_nbytes(numel, limit)
    if not sharded:
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
    """The views of one reduction: gradients as float32 blocks, one norm for every block of every parameter.

    Blocks are counted from a parameter's first element in every layout and world size.
    """

    def __init__(self, views: Sequence[ParamView], comm: Comm, step: StepContext, block_size: int) -> None:
        self.views = [view for view in views if view.spec.numel]
        self.comm = comm
        self.step = step
        self.sharded = any(view.spec.sharded for view in views)
        if self.views:
            self.packed = _packing_of(tuple((view.spec.name, view.spec.numel) for view in self.views), block_size)
            flat = self.packed.join([view.flat() for view in self.views], self.views[0].x.device)
            self.h_KB = flat.view(-1, block_size)
            self.at_once = max(1, PART_NUMEL[self.h_KB.is_cuda] // block_size)

    def agree(self, norm_K: Tensor) -> Generator[Pending, None, Tensor]:
        """The largest norm over ranks of every block; NaN if any rank's is not finite.

        NaN is sent as infinity, since backends differ in the maximum of NaN.
        """
        agreed_K = norm_K.nan_to_num(torch.inf, torch.inf)
        yield self.comm.all_reduce_max(agreed_K)
        return agreed_K.masked_fill_(agreed_K.isinf(), torch.nan)

    def round(self, scale_KB: Tensor, limit: int, rounding: Rounding, bound_K1: Tensor | None = None) -> Tensor:
        """int32 [K, B]: gradient over scale as a whole number; 0 where that is 0 or NaN.

        Args:
            scale_KB: Value of 1, also [K, 1].
            limit: Largest magnitude of the result.
            rounding: ``stochastic``: without bias.
            bound_K1: Clip the gradient to these magnitudes first; None: no clipping.
        """
        device = self.h_KB.device
        noise_KB = self.packed.noise(self.step.seed, CODE_STREAM, device) if rounding == "stochastic" else None
        code_KB = torch.empty(self.h_KB.shape, dtype=torch.int32, device=device)
        for first in range(0, len(code_KB), self.at_once):
            run = slice(first, first + self.at_once)
            y, scale = self.h_KB[run], scale_KB[run]
            if bound_K1 is not None:
                y = y.clamp(-bound_K1[run], bound_K1[run])
            usable = scale >= _TINY
            y = torch.where(usable, y, 0.0) / torch.where(usable, scale, 1.0)
            if noise_KB is not None:
                y += noise_KB[run]
            code_KB[run] = y.round_().clamp_(-limit, limit)
        return code_KB

    def rows(self, values_KB: Tensor) -> Tensor:
        """[W, n]: every view's values, cut over the ranks."""
        world_size, parts = self.comm.world_size, self.packed.views(values_KB.reshape(-1))
        if self.sharded:
            return torch.cat([view.rows(part) for view, part in zip(self.views, parts, strict=True)], 1)
        flat = torch.cat(parts)
        return torch.nn.functional.pad(flat, (0, -flat.numel() % world_size)).view(world_size, -1)

    def unrows(self, rows_WN: Tensor) -> Tensor:
        """The inverse of `rows`: [K, B]."""
        sizes = [view.spec.numel for view in self.views]
        if self.sharded:
            rows = rows_WN.split([view.row_numel for view in self.views], 1)
            parts = [part.reshape(-1)[:numel] for part, numel in zip(rows, sizes, strict=True)]
        else:
            parts = list(rows_WN.reshape(-1)[: sum(sizes)].split(sizes))
        return self.packed.join(parts, rows_WN.device, rows_WN.dtype).view_as(self.h_KB)

    def write_(self, totals: Tensor, scale_KB: Tensor) -> None:
        """Every view's mean from the integer sums of `sum_integers` and their scales, also [K, 1]."""
        scale_WN = self.rows(scale_KB.expand_as(self.h_KB))
        mean = totals * scale_WN[self.comm.rank] if self.sharded else totals * scale_WN / self.comm.world_size
        sizes = [view.out.numel() for view in self.views]
        parts = mean.view(-1)[: sum(sizes)].split(sizes)
        torch._foreach_copy_([view.out for view in self.views], list(parts))

    def trace(self, code_KB: Tensor, scale_KB: Tensor) -> None:
        """Pass the gradient and what the other ranks decode to tracers, for feedback and monitors."""
        parts = [self.packed.views(values_KB.view(-1)) for values_KB in (self.h_KB, code_KB * scale_KB)]
        for view, h, sent in zip(self.views, *parts, strict=True):
            view.trace(h, sent)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedScaleReducer(Reducer):
    """Stochastic integers in ``[-limit, limit]`` times a shared step, summed as integers.

    Args:
        limit: Largest code; 1 makes trits.
        block_size: Elements that share a scale.
        clip_sigmas: Clip each block's elements first, in standard deviations of this rank's block; None: no clipping.
        rounding: ``stochastic``: no bias; ``nearest``: least error.
        title: Its name in reports.
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
        norm_K = self._norm(shared)
        scale_KB = yield from self._scale(shared, (yield from shared.agree(norm_K))[:, None])
        bound_K1 = None if self.clip_sigmas is None else norm_K[:, None]
        code_KB = shared.round(scale_KB, self.limit, self.rounding, bound_K1)
        shared.trace(code_KB, scale_KB)
        totals = yield from sum_integers(shared.rows(code_KB), self.limit, comm, sharded=shared.sharded)
        shared.write_(totals, scale_KB)

    def _scale(self, shared: SharedViews, norm_K1: Tensor) -> Generator[Pending, None, Tensor]:
        """The step of each block, from the common norms; [K, B] where it differs in a block."""
        yield from ()
        return norm_K1 / self.limit

    def _norm(self, shared: SharedViews) -> Tensor:
        """float32 [K]: largest magnitude of each block after clipping; not finite if the block is not."""
        h_KB = shared.h_KB
        if self.clip_sigmas is None:
            return h_KB.abs().amax(-1)
        runs = zip(h_KB.split(shared.at_once), shared.packed.counts(h_KB.device).split(shared.at_once), strict=True)
        norm_K = torch.cat([clipped_absmax(*run, self.clip_sigmas) for run in runs])
        return torch.where(h_KB.isfinite().all(-1), norm_K, torch.inf)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 2 if specs[0].sharded else 3  # norms; codes, on one hop or two

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        numel = spec.row_numel(world_size, 1)
        codes = sum_nbytes(numel, self.limit, world_size, sharded=spec.sharded)
        norms = 2 * (world_size - 1) * -(-spec.numel // self.block_size) * 4 // world_size
        return codes + norms


@configuration
class SharedScale(TwoPrecisionCompressor):
    """All ranks round to the same grid, so that their integers can be summed exactly.

    With ``s = 2**(bits-1) - 1``:

    1. all ranks agree on ``w = max over ranks of max|g|`` of each block (an all-reduce of one float per block)
    2. every rank rounds ``g * s / w`` to integers in [-s, s] at random, without bias
    3. integers are summed exactly: `bits` per element to the owners, int32 there, and ``log2(2 W s + 1)`` bits per
       element from the owners (DDP)
    4. the mean is the sum times ``w / s / W``

    Nothing is quantized twice, so the downlink costs bits instead of error. A rank's small gradients are rounded to the
    grid of another rank's outliers.

    Args:
        bits: Bits per code, 2 to 8.
        block_size: Elements that share w, a power of two; a tensor in the publication.

    References:
        arXiv 2109.12497, 2021, on quantizers for all-reduce: QSGD with a shared maximum norm.
    """

    name: ClassVar[str] = "sharedscale"

    bits: int = 4
    block_size: int = 512

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        check_codes(self.block_size, bits=self.bits, high_precision_bits=self.high_precision_bits)

    def method(self, spec: TensorSpec) -> SharedScaleReducer:
        return SharedScaleReducer(limit=2 ** (self.bits - 1) - 1, block_size=self.block_size)

    def high_precision_method(self, spec: TensorSpec) -> SharedScaleReducer:
        bits = max(self.bits, self.high_precision_bits)
        return SharedScaleReducer(limit=2 ** (bits - 1) - 1, block_size=self.block_size)


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
        agreed = yield from all_of_bits(BITS.pack(padded.byte()), shared.comm)
        is_fine_KB = shared.unrows(BITS.unpack(agreed)[:, :numel].bool())
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
        bits: Bits per code, 2 to 8; the agreement takes two more.
        finer_bits: log2 of the quotient of the two steps, 1 to 8.
        block_size: Elements that share w, a power of two.
        high_precision_bits: Bits per code of embeddings and output heads, which have one scale.

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


@configuration
class TernGrad(TwoPrecisionCompressor):
    """Gradients as -1, 0 and 1 times a scaler, rounded without bias.

    For each block, on every rank:

    1. clip at `clip_sigmas` standard deviations of the rank's own block
    2. the scaler is ``s = max|g|``, the largest of all ranks' (an all-reduce of one float per block)
    3. ``s * sign(g)`` with probability ``|g| / s``, else 0; five trits to a byte, 1.6 bits per element
    4. trits are summed as integers and sent back exactly, with the bits that ``-W ... W`` needs: nothing is quantized
       twice

    Unbiased except for the clipping. The variance is large: use large batches or small learning rates.

    Args:
        block_size: Elements that share a scaler and a clipping bound, a power of two; a layer in the publication.
        clip_sigmas: Smaller: less variance, more bias. None: no clipping.

    References:
        Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning", 2017,
        arXiv 1705.07878, algorithm 1 and sections 3.3 (layer-wise ternarizing, gradient clipping, scaler sharing).
    """

    name: ClassVar[str] = "terngrad"

    block_size: int = 1024
    clip_sigmas: float | None = 2.5

    def __post_init__(self) -> None:
        TwoPrecisionCompressor.__post_init__(self)
        check_codes(self.block_size, high_precision_bits=self.high_precision_bits)
        if self.clip_sigmas is not None and not self.clip_sigmas > 0:
            raise ValueError(f"clip_sigmas must be positive or None, got {self.clip_sigmas!r}")

    def method(self, spec: TensorSpec) -> SharedScaleReducer:
        return SharedScaleReducer(
            limit=1, block_size=self.block_size, clip_sigmas=self.clip_sigmas, title="shared trits"
        )

    def high_precision_method(self, spec: TensorSpec) -> CodecPair:
        return CodecPair(BlockCodec(uniform(self.high_precision_bits, self.block_size), "stochastic"))


@functools.lru_cache(maxsize=256)
def _packing_of(parameters: tuple[tuple[str, int], ...], block_size: int) -> Packed:
    """The packing of whole parameters, by name and size, each in a separate tensor."""
    return Packed(
        Segments(Segment(0, numel, 0, 0, zlib.crc32(name.encode())) for name, numel in parameters), block_size
    )
