"""PowerSGD: low-rank gradients, by one subspace iteration per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import ordered_nbytes, sum_each
from lowbit_strategy.kernels.matrices import orthogonalize_all, product
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.low_rank import LowRankCompressor, matrix_shape
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods._base.residuals import zero_residuals
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.options.configuration import configuration


@configuration
class PowerSGD(LowRankCompressor):
    """Sends every matrix as a product of two thin ones, with error feedback.

    For a parameter of n x m (first dim, all others), with Q [m, rank] from the last step, on every rank:

    1. ``M = g + e``
    2. orthonormalize Q; ``P = M Q``; sum P over ranks; orthonormalize P
    3. ``Q = M^T P``; mean of Q over ranks
    4. the result is ``P Q^T``, the same on all ranks
    5. ``e' = M - P Q^T``

    Sums are formed in rank order, so results depend neither on buckets nor on the backend. Every rank
    computes the orthonormal columns and step 4 for itself, without a library routine, so ranks with different types of
    GPUs get the same bits. Under FSDP2 every rank has the whole local gradient, so the same factors are reduced, and
    each rank computes its own rows.

    Args:
        start_step: Gradients are sent uncompressed until this step, because early gradients are the least low-rank.

    Raises:
        ValueError: A field is out of range; `rank` is larger than every matrix of the model.

    References:
        Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
        2019, arXiv 1905.13727, algorithms 1 and 2. As in PyTorch's ``powerSGD_hook``, the residual is taken against the
        common result. Results are equal to that hook's in the one configuration where it works on gloo (a single
        bucket).
    """

    name: ClassVar[str] = "powersgd"
    fixed_size: ClassVar[bool] = True
    temporary_nbytes: ClassVar[float] = 2.9

    start_step: int = 0

    def __post_init__(self) -> None:
        LowRankCompressor.__post_init__(self)
        if self.start_step < 0:
            raise ValueError(f"start_step must be 0 or a positive integer, got {self.start_step!r}")

    def phase(self, step_index: int) -> Compressor:
        return Dense() if step_index < self.start_step else self

    @property
    def label(self) -> str:
        return f"rank {self.rank}"

    @property
    def residual_gain(self) -> float | None:
        return 1.0

    def init(self, specs: Sequence[TensorSpec], device: torch.device) -> ReducerState:
        state = zero_residuals(specs, device)
        for spec in specs:
            state[spec.name]["q"] = self.random_factor(spec, 1, seed=0).to(device)
        return state

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        matrices = [
            (view.flat().float() + state[view.spec.name]["residual"]).view(matrix_shape(view.spec)) for view in views
        ]
        qs = orthogonalize_all([state[view.spec.name]["q"] for view in views])
        ps = yield from sum_each([m @ q for m, q in zip(matrices, qs, strict=True)], comm)
        # Q must never become NaN, which would persist: the matrix is treated as zero, and the result is NaN.
        bad = [~p.isfinite().all() for p in ps]
        ps = orthogonalize_all([torch.where(b, 0.0, p) for p, b in zip(ps, bad, strict=True)])

        own_qs = [m.T @ p for m, p in zip(matrices, ps, strict=True)]
        sums = yield from sum_each(own_qs, comm)
        for i, view in enumerate(views):
            tensors, mean_q = state[view.spec.name], sums[i] / comm.world_size
            mean = torch.where(bad[i], torch.nan, product(ps[i], mean_q))
            if view.tracer is not None:
                view.trace(matrices[i], ps[i] @ own_qs[i].T)
            self.store_factor_(tensors["q"], mean_q)
            self.store_error_(tensors["residual"], matrices[i] - mean)  # against the common result
            view.write_mean_(mean.reshape(-1), comm.rank)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 4  # both factors, each summed and gathered

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return sum(ordered_nbytes(size * self.rank, 4, world_size) for size in matrix_shape(spec))
