"""GSpar: elements sampled by their size, without bias and without a residual."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import ClassVar, Literal

import torch

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, dither, stream_key
from lowbit_strategy.kernels.select import Sum
from lowbit_strategy.methods._base.positions import OwnPositions
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.residuals import zero_residuals
from lowbit_strategy.methods.zoo.sampling import inclusion_probabilities
from lowbit_strategy.options.configuration import configuration


@configuration
class GSpar(OwnPositions):
    """Unbiased sparsification: elements are sampled with probabilities proportional to their size.

    Every step, for each parameter of n elements, on every rank:

    1. probabilities ``p = min(1, c |g|)`` that add up to ``density * n``, those of least variance
    2. each element is sampled with its probability, and sent as ``g / p``
    3. the mean over ranks of what was sent, 0 where no rank sent

    Stateless and noisy: use large batches, and densities of a tenth rather than a hundredth. `TopK` with its residual
    sends ten times less for the same loss.

    Args:
        density: Expected share of each parameter's elements that is sent, in (0, 1].
        values: How values travel; see `TopK`. ``int8`` is rounded to the nearest, which adds a bias; its error is
            lost.

    References:
        Wangni et al., "Gradient Sparsification for Communication-Efficient Distributed Optimization", 2018, arXiv
        1710.09854, algorithms 1 and 3.
    """

    name: ClassVar[str] = "gspar"
    title: ClassVar[str] = "unbiased"
    own_temporary_nbytes: ClassVar[float] = 3.7

    density: float = 0.1
    residual: Literal["float32", "int8"] = field(default="float32", init=False)  # no residual is kept

    @property
    def residual_gain(self) -> float | None:
        return None

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return {}  # state exists for one step only

    def reduce_float32(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        fresh = zero_residuals([view.spec for view in views], views[0].x.device)
        yield from OwnPositions.reduce_float32(self, views, fresh, comm, step)

    def choose(self, view: ParamView, total: Sum, tensors: StateTensors, step: StepContext) -> Chosen:
        g_N = total.formed()
        p_N = inclusion_probabilities(g_N.abs(), self.num_kept(view.spec))
        key = stream_key(step.seed, zlib.crc32(view.spec.name.encode()), CODE_STREAM)
        indices = (dither(0, g_N.numel(), key, g_N.device) + 0.5 < p_N).nonzero().view(-1)
        return Chosen(indices, g_N.index_select(0, indices) / p_N.index_select(0, indices))
