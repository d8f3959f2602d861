"""What monitors and controllers measure of a bucket, and how it is summed over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.local import LocalComm
from lowbit_strategy.engine.bucket import BucketLayout, Entry
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.base import Compressor, View
from lowbit_strategy.methods._base.tensor_spec import TensorSpec

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


class Compensated(NamedTuple):
    """What is to be said of one parameter, float32 ``[numel]``, and the squared norm of the residual in it."""

    values: Tensor
    residual_square: Tensor


def compensated(sync: GradientSync, view: View) -> Compensated:
    """Gradient plus residual; a copy. Call before the bucket's stages start."""
    values = view.flat().to(torch.float32, copy=True)
    residual = sync.export_residual(view.spec.name)
    if residual is None:
        residual = sync.carryover.get(view.spec.name)
    if residual is None:
        return Compensated(values, torch.zeros((), device=values.device))
    return Compensated(values.add_(residual), torch.dot(residual, residual))


def energies(said: Tensor, sent: Tensor) -> Tensor:
    """float32 [4]: squares of what was to be said, of what was said and of the difference; and their dot product."""
    error = said - sent
    return torch.stack([torch.dot(said, said), torch.dot(sent, sent), torch.dot(error, error), torch.dot(said, sent)])


def try_level(
    level: Compressor, values: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], seed: int
) -> dict[str, Tensor]:
    """`energies` of each tensor if `level` had to say it: the method runs in a world of one rank, its state is new."""
    chosen = [specs[name] for name in values if specs[name].numel]
    if not chosen:
        return {}
    x = torch.cat([values[spec.name] for spec in chosen])
    sync = GradientSync(level, chosen, LocalComm(), x.device, scatter=True, seed=seed)
    entries, at = [], 0
    for spec in chosen:
        entries.append(Entry(spec.name, at))
        at += spec.numel
    layout = BucketLayout(tuple(entries), row_numel=at)
    out = torch.empty_like(x)
    for _ in range(_WARM_ROUNDS if _starts_warm(sync) else 1):
        _forget_residuals_(sync)
        for pending in sync.reduce(layout, x.clone(), out):
            if pending is not None:
                pending.wait()
        sync.end_step()
    pairs = zip(chosen, out.split([spec.numel for spec in chosen]), strict=True)
    return {spec.name: energies(values[spec.name], sent) for spec, sent in pairs}


def _starts_warm(sync: GradientSync) -> bool:
    return any(key != "residual" for state in sync.reducers.values() for tensors in state.values() for key in tensors)


def _forget_residuals_(sync: GradientSync) -> None:
    for state in sync.reducers.values():
        for tensors in state.values():
            if "residual" in tensors:
                tensors["residual"].zero_()


def table(rows: Mapping[str, Tensor], names: Sequence[str], width: int, device: torch.device) -> Tensor:
    """The rows of `names` in order, float64 ``[names, width]`` on `device`; zeros where there is none."""
    empty = torch.zeros(width, dtype=torch.float64, device=device)
    return torch.stack([rows[name].to(torch.float64) if name in rows else empty for name in names])
