"""What methods with a scale that all ranks share have in common: agreeing on it, rounding to it, writing the mean."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.codecs.block import Rounding
from lowbit_strategy.codecs.packed import PART_NUMEL
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.step_context import StepContext
from lowbit_strategy.kernels.reference.blocks import to_blocks
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, dither, stream_key
from lowbit_strategy.methods._base.reducer import View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec

_TINY = torch.finfo(torch.float32).tiny


class SharedViews:
    """The views of one reduction: gradients as flat float32, one norm for every block of every parameter.

    Blocks are counted from a parameter's first element, whatever the layout and the world size.
    """

    def __init__(self, views: Sequence[View], comm: Comm, step: StepContext, block_size: int) -> None:
        self.views = [view for view in views if view.spec.numel]
        self.comm = comm
        self.step = step
        self.block_size = block_size
        self.scatter = any(view.scatter for view in views)
        self.gradients = [view.flat().float() for view in self.views]

    def blocks(self, index: int) -> Tensor:
        """float32 [K, B] of one view's gradient."""
        return to_blocks(self.gradients[index], self.block_size)

    def agree(self, norms: Sequence[Tensor]) -> Generator[Pending, None, list[Tensor]]:
        """The largest norm over ranks of every block; NaN where any rank's is not finite.

        Infinity stands for NaN on the way: a maximum of NaN means different things to different backends.
        """
        local = torch.cat(list(norms))
        agreed = torch.where(local.isfinite(), local, torch.inf)
        yield self.comm.all_reduce_max(agreed)
        agreed = torch.where(agreed.isinf(), torch.nan, agreed)
        return list(agreed.split([norm.numel() for norm in norms]))

    def spread(self, values_K: Tensor, index: int) -> Tensor:
        """One number per block as one number per element, flat [numel]."""
        return values_K.repeat_interleave(self.block_size)[: self.views[index].spec.numel]

    def round(
        self, index: int, scale_N: Tensor, limit: int, rounding: Rounding, bound_N: Tensor | None = None
    ) -> Tensor:
        """int32 [numel]: gradient over `scale_N` as a whole number; 0 where that is 0 or NaN.

        Args:
            index: Which view it is.
            scale_N: Distance of two whole numbers.
            limit: Largest magnitude of the result.
            rounding: ``stochastic``: without bias.
            bound_N: The gradient is clipped to these magnitudes first; None: not at all.
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
        if self.scatter:
            return torch.cat([view.rows(value) for view, value in zip(self.views, values, strict=True)], 1)
        flat = torch.cat(list(values))
        return torch.nn.functional.pad(flat, (0, -flat.numel() % world_size)).view(world_size, -1)

    def unrows(self, rows_WN: Tensor) -> list[Tensor]:
        """The inverse of `rows`: flat values of every view."""
        if self.scatter:
            parts = rows_WN.split([view.cut.row_numel for view in self.views], 1)
            return [part.reshape(-1)[: view.spec.numel] for part, view in zip(parts, self.views, strict=True)]
        sizes = [view.spec.numel for view in self.views]
        return list(rows_WN.reshape(-1)[: sum(sizes)].split(sizes))

    def write_(self, totals: Tensor, scales: Sequence[Tensor]) -> None:
        """Every view's mean from the integer sums of `sum_integers` and the scales they count in."""
        world_size, rank = self.comm.world_size, self.comm.rank
        if not self.scatter:
            for view, total, scale_N in zip(self.views, self.unrows(totals), scales, strict=True):
                view.out.copy_(total * scale_N / world_size)
            return
        own = totals.split([view.cut.row_numel for view in self.views])
        for view, total, scale_N in zip(self.views, own, scales, strict=True):
            start, length = rank * view.cut.row_numel, view.cut.row_length(rank)
            view.out[:length] = total[:length] * scale_N[start : start + length]
            view.out[length:] = 0

    def observe_(self, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> None:
        """For feedback and monitors: the gradient, and what the others decode of it."""
        for view, gradient, code, scale_N in zip(self.views, self.gradients, codes, scales, strict=True):
            if view.compensated is not None:
                view.compensated.copy_(gradient)
            if view.sent is not None:
                view.sent.copy_(code * scale_N)


def agreed_nbytes(spec: TensorSpec, block_size: int, world_size: int) -> int:
    """Bytes a rank sends to agree on the norms of one parameter."""
    return 2 * (world_size - 1) * -(-spec.numel // block_size) * 4 // world_size
