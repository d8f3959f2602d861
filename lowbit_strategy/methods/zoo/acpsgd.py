"""ACP-SGD: PowerSGD that sends one of its two factors per step, alternately."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import ordered_nbytes, sum_each
from lowbit_strategy.kernels.matrices import orthogonalize_all, product
from lowbit_strategy.methods._base.low_rank import LowRankCompressor, matrix_shape
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.residuals import zero_residuals
from lowbit_strategy.options.configuration import configuration


@configuration
class ACPSGD(LowRankCompressor):
    """`PowerSGD` with one factor per step: half of its bytes and messages.

    For a parameter of n x m (first dim, all others), on every rank:

    1. ``M = g + e``
    2. even steps: orthonormalize Q of the last step, ``P = M Q``; odd steps: orthonormalize P, ``Q = M^T P``
    3. ``e' = M - P Q^T`` with this rank's own factor
    4. the mean of the factor over ranks; the result is ``P Q^T``, the same on all ranks

    Sums and products are computed as in `PowerSGD`.

    Raises:
        ValueError: A field is out of range; `rank` is larger than every matrix of the model.

    References:
        Zhang et al., "Evaluation and Optimization of Gradient Compression for Distributed Deep Learning", 2023,
        arXiv 2306.08881, algorithm 2.
    """

    name: ClassVar[str] = "acpsgd"
    temporary_nbytes: ClassVar[float] = 1.7

    @property
    def label(self) -> str:
        return f"rank {self.rank}, factors in turns"

    @property
    def residual_gain(self) -> float | None:
        return 1.0

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        state = zero_residuals(specs, device)
        for spec in specs:
            state[spec.name]["p"] = self.random_factor(spec, 0, seed=1).to(device)
            state[spec.name]["q"] = self.random_factor(spec, 1, seed=0).to(device)
        return state

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        sends, keeps = ("p", "q") if step.index % 2 == 0 else ("q", "p")
        matrices = []
        for view in views:
            h_N = view.flat().float() + state[view.spec.name]["residual"]
            h_NM = h_N.view(matrix_shape(view.spec))
            matrices.append(h_NM if sends == "p" else h_NM.T)
        bases = orthogonalize_all([state[view.spec.name][keeps] for view in views])
        own = [matrix @ basis for matrix, basis in zip(matrices, bases, strict=True)]
        sums = yield from sum_each(own, comm)
        for view, matrix, basis, own_factor, total in zip(views, matrices, bases, own, sums, strict=True):
            tensors, mean_factor = state[view.spec.name], total / comm.world_size
            sent, mean = product(own_factor, basis), product(mean_factor, basis)
            error = matrix - sent
            if sends == "q":
                matrix, sent, mean, error = matrix.T, sent.T, mean.T, error.T
            view.trace(matrix, sent)
            self.store_factor_(tensors[sends], mean_factor)
            self.store_error_(tensors["residual"], error)
            view.write_mean_(mean.reshape(-1), comm.rank)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 2

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        """The mean of even and odd steps."""
        return sum(ordered_nbytes(size * self.rank, 4, world_size) for size in matrix_shape(spec)) // 2
