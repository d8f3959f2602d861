"""Measures buckets for monitors and controllers, and sums the measurements over ranks."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit_strategy.codecs.packed import PART_NUMEL
from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import ParamView
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.kernels.norms import squared_norm
from lowbit_strategy.kernels.reference.rng import hash32, positions_in, strata

_SAMPLE = 2048  # elements per parameter, at most


def sum_over_ranks(values: Tensor, comm: Comm) -> Tensor:
    """Add every rank's `values` in rank order, in float64 on the CPU, bit-identical everywhere."""
    own = values.detach().to(torch.float64).reshape(-1)
    if comm.world_size == 1:
        return own.cpu().view(values.shape)
    gathered = torch.empty(comm.world_size, own.numel(), dtype=torch.float64, device=own.device)
    comm.all_gather(gathered.view(torch.uint8), own.view(torch.uint8)).wait()
    total = gathered[0].cpu()
    for row in gathered[1:].cpu():
        total = total + row
    return total.view(values.shape)


def energies(compensated: Tensor, sent: Tensor) -> Tensor:
    """Squared norms of the compensated gradient, of what was sent, and of the difference: float64 [3]."""
    part_numel = PART_NUMEL[compensated.is_cuda]
    parts = zip(compensated.split(part_numel), sent.split(part_numel), strict=True)
    errors = [squared_norm(h - q) for h, q in parts]  # in parts that fit a cache
    return torch.stack([squared_norm(compensated), squared_norm(sent), torch.stack(errors).sum()])


class StepMeasure:
    """Measurements of one step for monitors and controllers: per parameter, as sums of squares that ranks add up.

    Args:
        sync: The engine.

    Attributes:
        rows: By figure, a float64 row for every measured parameter.
        sampling_nbytes: Bytes that this rank has sent for `compare`, by receiving ranks.
    """

    def __init__(self, sync: GradientSync) -> None:
        self._sync = sync
        self.rows: defaultdict[Hashable, dict[str, Tensor]] = defaultdict(dict)
        self.sampling_nbytes: Counter[Comm] = Counter()

    def add_residual(self, name: str, residual: Tensor | None) -> None:
        """Add figure ``residual``, one number."""
        if residual is not None:
            self.rows["residual"][name] = squared_norm(residual).view(1)

    def compare(self, views: Sequence[ParamView], comm: Comm, stages: Stages) -> Stages:
        """Add figure ``end_to_end``, two numbers: the squared norms of both hops' error and of the true mean.

        The mean of all elements would need an uncompressed all-reduce. A sample of every parameter is enough and costs
        a few kilobytes: the same evenly spread elements on all ranks, different in every step. Sums over ranks estimate
        the norms: under DDP every rank has the whole result and contributes 1/W, under FSDP2 it contributes what its
        row shows.

        Args:
            views: Views of the bucket's parameters.
            comm: The ranks that reduce the bucket.
            stages: The stages that reduce the bucket.
        """
        device, seed = self._sync.device, self._sync.step_context().shared_seed
        samples = [sampled(view.spec.numel, hash32(seed + at), device) for at, view in enumerate(views)]
        picked = [view.flat()[positions_N].float() for view, (positions_N, _) in zip(views, samples, strict=True)]
        mean = torch.cat([torch.empty(0, device=device), *picked])  # a bucket may have no parameters
        before = comm.sent_nbytes
        arrives = comm.all_reduce(mean)
        self.sampling_nbytes[comm] += comm.sent_nbytes - before
        yield arrives
        yield from stages
        means = (mean / comm.world_size).split([each.numel() for each in picked])
        for view, mean_N, sample in zip(views, means, samples, strict=True):
            self.rows["end_to_end"][view.name] = _compared(view, mean_N, *sample, comm)

    def summed(
        self, widths: Mapping[Any, int], facts: Sequence[float] = (), names: Sequence[str] | None = None
    ) -> tuple[dict[Any, Tensor], list[float]]:
        """The rows of each figure, ``[names, width]``, and the mean of each fact, by one exchange among all ranks.

        Args:
            widths: Length of a row, by figure. A parameter without a row gets zeros.
            facts: This rank's other numbers.
            names: The parameters; None: all of them.
        """
        names, device = list(self._sync.specs) if names is None else names, self._sync.device
        parts = []
        for figure, width in widths.items():
            rows, empty = self.rows[figure], torch.zeros(width, device=device)
            parts.append(torch.cat([rows.get(name, empty).double() for name in names]))
        parts.append(torch.tensor(facts, dtype=torch.float64, device=device))
        everyone = self._sync.ranks.everyone
        *sums, means = sum_over_ranks(torch.cat(parts), everyone).split([part.numel() for part in parts])
        tables = {key: each.view(len(names), widths[key]) for key, each in zip(widths, sums, strict=True)}
        return tables, (means / everyone.world_size).tolist()


def sampled(numel: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Positions of at most `_SAMPLE` elements, and the number of elements that each represents (the reciprocal of its
    probability), regardless of the tensor's shape.
    """
    starts, lengths = _strata(numel, device)
    return positions_in(starts, lengths, seed), lengths.double()


@functools.lru_cache(maxsize=64)  # 32 KiB each
def _strata(numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return strata(numel, min(numel, _SAMPLE), device)


def _compared(view: ParamView, mean_N: Tensor, positions_N: Tensor, weights_N: Tensor, comm: Comm) -> Tensor:
    """The two squared norms in float64 [2], since in float32 squares of elements below 1e-19 would vanish."""
    if view.spec.sharded:
        first, length = comm.rank * view.row_numel, view.row_length(comm.rank)
        places = torch.tensor([first, first + length], device=positions_N.device)
        own = slice(*torch.searchsorted(positions_N, places).tolist())
        result_N = view.out[positions_N[own] - first].float() / comm.world_size
        mean_N, weights_N = mean_N[own], weights_N[own]
    else:
        result_N, weights_N = view.out[positions_N], weights_N / comm.world_size
    result, mean = result_N.double(), mean_N.double()
    return torch.stack([result - mean, mean]).square() @ weights_N
