"""GSpar: elements sampled by their size, without bias and without a residual."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, dither, stream_key
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.sparse import SparseCompressor, SparseReducer
from lowbit_strategy.methods._base.sparse_residuals import zero_residuals
from lowbit_strategy.options.configuration import configuration

_ROUNDS = 16
_CLOSE = 1.001


def inclusion_probabilities(sizes_N: Tensor, count: float) -> Tensor:
    """Probabilities, float32 [N]: ``min(1, c * size)``, with c such that they add up to `count`.

    Sending ``x / p`` with probability p is unbiased, and these p have the least variance for their sum. Sizes of 0 get
    a probability of 0.

    Args:
        sizes_N: float32, not negative, finite.
        count: Expected number; from N on, all nonzero sizes get 1.

    References:
        Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", 2018, arXiv
        1710.09854, algorithm 3; Wang et al., "ATOMO", 2018, arXiv 1806.04090, algorithm 1.
    """
    if count >= sizes_N.numel():
        return (sizes_N > 0).float()
    scaled = sizes_N / sizes_N.max().clamp(min=torch.finfo(torch.float32).tiny)  # sums neither overflow nor vanish
    p_N = (scaled * count / scaled.sum().clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    for _ in range(_ROUNDS):
        certain = p_N >= 1.0
        rest = float(p_N.masked_fill(certain, 0.0).sum())
        growth = (count - int(certain.sum())) / rest if rest > 0 else 0.0
        if growth <= _CLOSE:
            break
        p_N = (p_N * growth).clamp(max=1.0)
    return p_N


class GSparReducer(SparseReducer):
    """Fields as in `GSpar`. The state of a sparse method exists for one step only."""

    title: ClassVar[str] = "unbiased"
    temporary_nbytes: ClassVar[float] = 3.7

    @property
    def residual_gain(self) -> float | None:
        return None

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return {}

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        if views:
            fresh = zero_residuals([view.spec for view in views], views[0].x.device)
            yield from SparseReducer.reduce(self, views, fresh, comm, step)

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        g_N = total.formed()
        p_N = inclusion_probabilities(g_N.abs(), self.num_kept(view.spec))
        key = stream_key(step.seed, zlib.crc32(view.spec.name.encode()), CODE_STREAM)
        indices = (dither(0, g_N.numel(), key, g_N.device) + 0.5 < p_N).nonzero().view(-1)
        return Chosen(indices, g_N.index_select(0, indices) / p_N.index_select(0, indices))


@configuration
class GSpar(SparseCompressor):
    """Unbiased sparsification: elements are sampled with probabilities proportional to their size.

    Every step, for each parameter of n elements, on every rank:

    1. probabilities ``p = min(1, c |g|)`` that add up to ``density * n``, those of least variance
    2. each element is sampled with its probability, and sent as ``g / p``
    3. the mean over ranks of what was sent, 0 where no rank sent

    Stateless and noisy: use large batches, and densities of a tenth rather than a hundredth. `TopK` with its residual
    sends ten times less for the same loss.

    Args:
        density: Expected share of each parameter's elements that is sent, in (0, 1].
        values: How values travel; see `TopK`. Rounding errors are lost.
        residual: Not used.

    References:
        Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", 2018, arXiv
        1710.09854, algorithms 1 and 3.
    """

    name: ClassVar[str] = "gspar"

    density: float = 0.1

    def reducer(self, spec: TensorSpec) -> GSparReducer:
        return GSparReducer(density=self.density, codec=self.codec)

    method = reducer  # no residual
