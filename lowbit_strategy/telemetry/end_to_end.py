"""The error of a whole reduction, both hops: the result against the true mean of the ranks' gradients.

The true mean would take an uncompressed all-reduce. A sample of every parameter is enough for its norm, and costs a few
kilobytes: the same elements on all ranks, evenly spread, others in every step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, Pending
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
        self._strides = [-(-view.spec.numel // _SAMPLE) or 1 for view in views]
        self._starts = [hash32(seed + at) % stride for at, stride in enumerate(self._strides)]
        picked = [
            view.flat()[start::stride].to(torch.float32, copy=True)
            for view, start, stride in zip(views, self._starts, self._strides, strict=True)
        ]
        self._lengths = [part.numel() for part in picked]
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
        """After the bucket has been reduced: float32 [2] for each parameter, to be summed over ranks.

        The squared norms of the error and of the true mean, estimated for all elements. Under DDP every rank has the
        whole result and gives a W-th; under FSDP2 a rank gives what its own row shows.
        """
        return {
            view.spec.name: self._compare(view, mean, start, stride)
            for view, mean, start, stride in zip(
                self._views, self._sample.split(self._lengths), self._starts, self._strides, strict=True
            )
        }

    def _compare(self, view: View, mean: Tensor, start: int, stride: int) -> Tensor:
        world_size, rank = self._comm.world_size, self._comm.rank
        if not view.scatter:
            error = view.out[start::stride].float() - mean
            return torch.stack([error.square().sum(), mean.square().sum()]) * (stride / world_size)
        first, length = rank * view.cut.row_numel, view.cut.row_length(rank)
        begin = max(0, -(-(first - start) // stride))  # the first sampled element at or after the own row's first
        end = max(begin, -(-(first + length - start) // stride))
        own = mean[begin:end]
        offset = start + begin * stride - first
        result = view.out[offset:length:stride][: own.numel()].float() / world_size
        return torch.stack([(result - own).square().sum(), own.square().sum()]) * stride
