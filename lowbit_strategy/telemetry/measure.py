"""What monitors and controllers measure of a bucket, and how it is summed over ranks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, wait_for_all
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.sampling import squared_norm
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.ranks.ranks import Ranks

NUM_ENERGIES = 4
_WARM_ROUNDS = 3  # a method that starts warm (PowerSGD) is judged after it has seen the tensor before


class AloneBucket:
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
        entries = tuple(Entry(spec.name, at) for spec, at in zip(specs, offsets, strict=True))
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
    bucket = AloneBucket(level, chosen, x.device, seed=seed)
    out = torch.empty_like(x)
    for _ in range(_WARM_ROUNDS if _starts_warm(bucket.sync) else 1):
        _forget_residuals_(bucket.sync)
        bucket.reduce(x.clone(), out)
    pairs = zip(chosen, out.split([spec.numel for spec in chosen]), strict=True)
    return {spec.name: energies(values[spec.name], sent) for spec, sent in pairs}


def _starts_warm(sync: GradientSync) -> bool:
    """Whether a method with communication of its own keeps more than residuals."""
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
