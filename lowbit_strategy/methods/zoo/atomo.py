"""ATOMO: singular components sampled without bias."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.collectives.ordered import flattened
from lowbit_strategy.kernels.matrices import product
from lowbit_strategy.kernels.reference.rng import CODE_STREAM, dither, stream_key
from lowbit_strategy.methods._base.low_rank import LowRankCompressor, matrix_shape
from lowbit_strategy.methods._base.reducer import ReducerState
from lowbit_strategy.methods.zoo.sampling import inclusion_probabilities
from lowbit_strategy.options.configuration import configuration


@configuration
class ATOMO(LowRankCompressor):
    """A few of the gradient's singular vectors, sampled without bias: no residual.

    For a parameter of n x m (first dim, all others), on every rank:

    1. the singular value decomposition of g, ``sum of sigma_i u_i v_i^T``
    2. probabilities ``p_i = min(1, c sigma_i)`` that add up to `rank`; `rank` atoms are sampled
    3. all ranks get ``sigma_i / p_i u_i`` and ``v_i`` of every rank, and add them up

    Ranks choose different atoms, so traffic grows with W. A decomposition per matrix and step costs far more than
    `PowerSGD`'s products. Sampling is noisy: use large batches or small learning rates.

    Args:
        rank: Atoms per rank and matrix. Larger: more bytes, less noise.

    Raises:
        ValueError: A field is out of range; `rank` is larger than every matrix of the model.

    References:
        Wang et al., "ATOMO: Communication-efficient Learning via Atomic Sparsification", 2018, arXiv 1806.04090,
        algorithms 1 and 2, spectral. There atoms are sampled independently, and their number varies.
    """

    name: ClassVar[str] = "atomo"
    fixed_size: ClassVar[bool] = True

    @property
    def label(self) -> str:
        return f"{self.rank} atoms"

    def reduce(
        self, views: Sequence[ParamView], state: ReducerState, comm: Comm, step: StepContext
    ) -> Iterator[Pending]:
        own = []
        for view in views:
            g_NM = view.flat().float().view(matrix_shape(view.spec))
            own.append(_drawn(g_NM, self.rank, step.seed ^ zlib.crc32(view.spec.name.encode())))
        message = flattened([factor for pair in own for factor in pair])
        received_WN = message.new_empty(comm.world_size, message.numel())
        yield comm.all_gather(received_WN, message)
        parts = received_WN.split([sum(factor.numel() for factor in pair) for pair in own], dim=1)
        for view, pair, part_WN in zip(views, own, parts, strict=True):
            rows, columns = matrix_shape(view.spec)
            total = part_WN.new_zeros(rows, columns)
            for row in part_WN:
                total += product(row[: rows * self.rank].view(rows, -1), row[rows * self.rank :].view(columns, -1))
            if view.tracer is not None:
                view.trace(view.flat().float(), product(*pair))
            view.write_mean_((total / comm.world_size).reshape(-1), comm.rank)

    def num_messages(self, specs: Sequence[TensorSpec], world_size: int) -> int:
        return 1

    def wire_nbytes(self, spec: TensorSpec, world_size: int) -> int:
        return 4 * (world_size - 1) * self.rank * sum(matrix_shape(spec))


def _drawn(g_NM: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """``u sigma / p`` [N, rank] and ``v`` [M, rank] of the sampled atoms, padded with zeros.

    Systematic sampling: the probabilities are laid end to end, and every integer plus one common draw takes the atom
    that it falls into. Each has its probability, and their number is always `rank`.
    """
    finite = bool(g_NM.isfinite().all())
    u, sigma, vh = torch.linalg.svd(g_NM if finite else torch.zeros_like(g_NM), full_matrices=False)
    p = inclusion_probabilities(sigma, rank)
    draw = dither(0, 1, stream_key(seed, 0, CODE_STREAM), g_NM.device) + 0.5
    edges = p.double().cumsum(0)
    hits = (edges - draw).ceil().clamp_(min=0)
    at = hits.diff(prepend=hits.new_zeros(1)).nonzero().view(-1)[:rank]
    busy_NM = g_NM != 0  # rounding errors make rows and columns of zeros nonzero in singular vectors
    scaled = torch.where(busy_NM.any(1, keepdim=True), u[:, at] * (sigma / p)[at], 0.0)
    vectors = torch.where(busy_NM.any(0)[:, None], vh[at].T, 0.0)
    if not finite:
        scaled = scaled.new_full((len(u), rank), torch.nan)
        vectors = vectors.new_ones(vh.shape[1], rank)
    padding = (0, rank - scaled.shape[1]), (0, rank - vectors.shape[1])
    return torch.nn.functional.pad(scaled, padding[0]), torch.nn.functional.pad(vectors, padding[1])
