"""RandomK: all ranks send the elements at the same random positions."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StateTensors, StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.sparse_layout import Chosen
from lowbit_strategy.kernels.reference.rng import sample_positions
from lowbit_strategy.methods._base.positions import CommonPositions
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.sparse_residuals import Condition, accumulate_, conditions
from lowbit_strategy.options.configuration import configuration


@configuration
class RandomK(CommonPositions):
    """Random sparsification.

    Every step, for each parameter of n elements:

    1. the ranks draw the same ``k = max(1, round(density * n))`` positions: one at random from each of k equal parts,
       by a hash of the step's shared seed, the parameter's name and the part
    2. every rank sends its ``h = g + e`` there; ``e' = h``, but 0 there
    3. the result is the mean over ranks there, and 0 elsewhere

    Args:
        scale: Send ``g / probability`` instead, without a residual: unbiased, with n / k times the variance.

    References:
        Stich et al., "Sparsified SGD with Memory", 2018, arXiv 1809.07599; Wangni et al., 2018, arXiv 1710.09854.
    """

    name: ClassVar[str] = "randomk"

    scale: bool = False

    @property
    def label(self) -> str:
        return f"random-k {self.density:g}{', scaled' if self.scale else ''}"

    @property
    def residual_gain(self) -> float | None:
        return None if self.scale else 1.0

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        return {} if self.scale else CommonPositions.init(self, specs, device)

    def accumulate_(self, views: Sequence[ParamView], state: ReducerState) -> list[Condition]:
        return conditions([view.x for view in views]) if self.scale else accumulate_(views, state)

    def positions(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Generator[Pending, None, list[Tensor]]:
        chosen = []
        for view in views:
            seed = step.shared_seed ^ zlib.crc32(view.spec.name.encode())
            chosen.append(sample_positions(view.spec.numel, self.num_kept(view.spec), seed, view.x.device))
        return chosen
        yield  # makes this a generator, without anything to wait for

    def values_at(self, view: ParamView, tensors: StateTensors, indices: Tensor) -> Tensor:
        if not self.scale:
            return CommonPositions.values_at(self, view, tensors, indices)
        num = indices.numel()
        edges = torch.arange(num + 1, device=indices.device) * view.spec.numel // max(num, 1)
        return view.flat().index_select(0, indices).float() * edges.diff()  # one over each position's probability

    def update_residual_(self, view: ParamView, tensors: StateTensors, sent: Chosen) -> None:
        if not self.scale:
            CommonPositions.update_residual_(self, view, tensors, sent)
