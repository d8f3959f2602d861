"""What monitors and controllers measure of a bucket, and how it is summed over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, LocalComm, Pending, wait_for_all
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.sampling import Sample, spread_sample, squared_norm
from lowbit_strategy.kernels.reference.rng import hash32
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.method import CodecPair
from lowbit_strategy.ranks.ranks import Ranks

NUM_ENERGIES = 4
_WARM_ROUNDS = 3  # a method that starts warm (PowerSGD) is judged after it has seen the tensor before
NUM_SUMS = 2  # of `MeanSample.sums`
_SAMPLE = 2048  # elements per parameter, at most
# One parameter for each method that a configuration may give: compressed, high precision, exempt.
_SPECS = (TensorSpec("matrix", (128, 512)), TensorSpec("table", (128, 512), "embedding"), TensorSpec("vector", (96,)))
_DTYPES = (torch.float32, torch.bfloat16)  # of gradients: which one it will be shows in the first step


class SingleRankBucket:
    """Parameters as one bucket that this rank reduces alone, as one of `world_size` whose others send nothing."""

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        device: torch.device,
        *,
        world_size: int = 1,
        scatter: bool = True,
        seed: int = 0,
    ) -> None:
        ranks = Ranks.flat(LocalComm(world_size))
        self.sync = GradientSync(compressor, specs, ranks, device, scatter=scatter, seed=seed)
        widths = [self.sync.state.row_numel(spec.name) if scatter else spec.numel for spec in specs]
        *offsets, self.numel = itertools.accumulate(widths, initial=0)
        entries = tuple((spec.name, at) for spec, at in zip(specs, offsets, strict=True))
        self._layout = BucketLayout(entries, self.numel if scatter else None)

    def reduce(self, x: Tensor, out: Tensor) -> None:
        """One step."""
        self.sync.begin_step()
        wait_for_all(self.sync.reduce(self._layout, x, out))
        self.sync.end_step()


def sum_over_ranks(values: Tensor, comm: Comm) -> Tensor:
    """Every rank's `values` added in rank order, float64 on the CPU: bit-identical everywhere."""
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
    """float64 [4]: squares of the compensated gradient, of what was sent, of the difference; and their dot product."""
    h, s, error = squared_norm(compensated), squared_norm(sent), squared_norm(compensated - sent)
    return torch.stack([h, s, error, (h + s - error) / 2])


def try_level(
    level: Compressor, values: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], seed: int
) -> dict[str, Tensor]:
    """`energies` of each tensor if `level` had to send it: the method runs in a world of one rank, its state is new."""
    chosen = [specs[name] for name in values if specs[name].numel]
    if not chosen:
        return {}
    x = torch.cat([values[spec.name] for spec in chosen])
    bucket = SingleRankBucket(level, chosen, x.device, seed=seed)
    out = torch.empty_like(x)
    for _ in range(_WARM_ROUNDS if _starts_warm(bucket.sync) else 1):
        _forget_residuals_(bucket.sync)
        bucket.reduce(x.clone(), out)
    pairs = zip(chosen, out.split([spec.numel for spec in chosen]), strict=True)
    return {spec.name: energies(values[spec.name], sent) for spec, sent in pairs}


def _starts_warm(sync: GradientSync) -> bool:
    """Whether a `Reducer` keeps more than residuals."""
    keys = {key for name in sync.specs for key in sync.state.tensors(name)}
    return any("residual" not in key and "." not in key for key in keys)


def _forget_residuals_(sync: GradientSync) -> None:
    for name in sync.specs:
        for key, tensor in sync.state.tensors(name).items():
            if "residual" in key:
                tensor.zero_()


def table(rows: Mapping[str, Tensor], names: Sequence[str], width: int, device: torch.device) -> Tensor:
    """The rows of `names` in order, float64 ``[names, width]`` on `device`; zeros where there is none."""
    empty = torch.zeros(width, dtype=torch.float64, device=device)
    return torch.stack([rows[name].to(torch.float64) if name in rows else empty for name in names])


def rehearse(level: Compressor, *, world_size: int, scatter: bool, device: torch.device) -> None:
    """Reduce a small bucket as a rank of `world_size` would: both hops, every kind of parameter, every dtype.

    Triton compiles a kernel for a format, a dtype and what is left of the number of ranks, not for sizes. Methods with
    communication of their own have no kernels to compile.
    """
    specs = [spec for spec in _SPECS if isinstance(level.assign(spec).method, CodecPair)]
    for dtype in _DTYPES if specs else ():
        bucket = SingleRankBucket(level, specs, device, world_size=world_size, scatter=scatter)
        x = torch.ones(bucket.numel * world_size if scatter else bucket.numel, dtype=dtype, device=device)
        bucket.reduce(x, torch.empty(bucket.numel, dtype=dtype, device=device) if scatter else x)


class MeanSample:
    """A sample of one bucket's gradients, taken before it is reduced and compared with the result afterwards: the error
    of both hops, against the true mean of the ranks' gradients.

    The mean of all elements would take an uncompressed all-reduce. A sample of every parameter is enough for the norm
    of the error, and costs a few kilobytes: the same elements on all ranks, evenly spread, others in every step.

    Args:
        views: The bucket's parameters.
        comm: To form the true mean over.
        seed: The same on all ranks.
        device: Of gradients; a bucket may have no views.
    """

    def __init__(self, views: Sequence[ParamView], comm: Comm, seed: int, device: torch.device) -> None:
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

    def _compare(self, view: ParamView, mean_N: Tensor, sample: Sample) -> Tensor:
        world_size, rank = self._comm.world_size, self._comm.rank
        if not view.spec.sharded:
            return _sums(view.out[sample.positions_N], mean_N, sample.weights_N / world_size)
        first, length = rank * view.row_numel, view.row_length(rank)
        places = torch.tensor([first, first + length], device=sample.positions_N.device)
        own = slice(*torch.searchsorted(sample.positions_N, places).tolist())
        result = view.out[sample.positions_N[own] - first].float() / world_size
        return _sums(result, mean_N[own], sample.weights_N[own])


def _sums(result_N: Tensor, mean_N: Tensor, weights_N: Tensor) -> Tensor:
    """float64: in float32 the squares of elements below 1e-19 would vanish."""
    result, mean = result_N.double(), mean_N.double()
    return torch.stack([torch.dot(each.square(), weights_N) for each in (result - mean, mean)])
