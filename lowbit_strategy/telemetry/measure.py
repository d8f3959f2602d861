"""What monitors and controllers measure of a bucket, and how it is summed over ranks."""

from __future__ import annotations

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
    sync = GradientSync(level, chosen, Ranks.flat(LocalComm()), x.device, scatter=True, seed=seed)
    entries, at = [], 0
    for spec in chosen:
        entries.append(Entry(spec.name, at))
        at += spec.numel
    layout = BucketLayout(tuple(entries), row_numel=at)
    out = torch.empty_like(x)
    for _ in range(_WARM_ROUNDS if _starts_warm(sync) else 1):
        _forget_residuals_(sync)
        sync.begin_step()
        wait_for_all(sync.reduce(layout, x.clone(), out))
        sync.end_step()
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
