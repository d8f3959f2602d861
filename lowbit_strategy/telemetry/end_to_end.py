"""The error of a whole reduction, both hops: the result against the true mean of the ranks' gradients.

The true mean would take an uncompressed all-reduce. A sample of every parameter is enough for its norm, and costs a few
kilobytes: the same elements on all ranks, evenly spread, at hashed places, others in every step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
from lowbit_strategy.engine.sampling import Sample, spread_sample
from lowbit_strategy.kernels.reference.rng import hash32
from lowbit_strategy.methods._base.reducer import View

NUM_SUMS = 2  # of `MeanSample.sums`
_SAMPLE = 2048  # elements per parameter, at most


class MeanSample:
    """A sample of one bucket's gradients, taken before it is reduced and compared with the result afterwards.

    Args:
        views: The bucket's parameters.
        comm: To form the true mean over.
        seed: The same on all ranks.
        device: Of gradients; a bucket may have no views.
    """

    def __init__(self, views: Sequence[View], comm: Comm, seed: int, device: torch.device) -> None:
        self._views = views
        self._comm = comm
        self._samples = [
            spread_sample(view.spec.numel, _SAMPLE, hash32(seed + at), view.x.device) for at, view in enumerate(views)
        ]
        picked = [
            view.flat()[sample.positions_N].to(torch.float32) for view, sample in zip(views, self._samples, strict=True)
        ]
        self._sample = torch.cat(picked) if picked else torch.empty(0, dtype=torch.float32, device=device)

    @property
    def sent_nbytes(self) -> int:
        """Bytes this rank sends for the sample, counted as `Comm.all_reduce` does."""
        world_size = self._comm.world_size
        return 2 * (world_size - 1) * self._sample.nbytes // world_size

    def exchange(self) -> Generator[Pending, None, None]:
        """Form the true mean of the sample; a stage like those of a bucket."""
        yield self._comm.all_reduce(self._sample)
        self._sample /= self._comm.world_size

    def sums(self) -> dict[str, Tensor]:
        """After the bucket has been reduced: float64 [2] for each parameter, to be summed over ranks.

        The squared norms of the error and of the true mean, estimated for all elements. Under DDP every rank has the
        whole result and gives a W-th; under FSDP2 a rank gives what its own row shows.
        """
        means = self._sample.split([sample.positions_N.numel() for sample in self._samples])
        return {
            view.spec.name: self._compare(view, mean, sample)
            for view, mean, sample in zip(self._views, means, self._samples, strict=True)
        }

    def _compare(self, view: View, mean_N: Tensor, sample: Sample) -> Tensor:
        world_size, rank = self._comm.world_size, self._comm.rank
        if not view.scatter:
            return _sums(view.out[sample.positions_N], mean_N, sample.weights_N / world_size)
        first, length = rank * view.cut.row_numel, view.cut.row_length(rank)
        places = torch.tensor([first, first + length], device=sample.positions_N.device)
        own = slice(*torch.searchsorted(sample.positions_N, places).tolist())
        result = view.out[sample.positions_N[own] - first].float() / world_size
        return _sums(result, mean_N[own], sample.weights_N[own])


def _sums(result_N: Tensor, mean_N: Tensor, weights_N: Tensor) -> Tensor:
    """float64: in float32 the squares of elements below 1e-19 would vanish."""
    result, mean = result_N.double(), mean_N.double()
    return torch.stack([torch.dot(each.square(), weights_N) for each in (result - mean, mean)])
