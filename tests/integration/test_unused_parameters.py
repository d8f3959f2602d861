"""Under FSDP2 some ranks do not use a parameter in a step: all ranks reduce the same ones, with every torch."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lowbit_strategy import LoCo
from lowbit_strategy.attach.attach import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.strategy_options import SyncOptions
from lowbit_strategy.model import fsdp_sharding
from testing.processes.ranks import run_ranks


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, all_of_it: bool) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x) if all_of_it else y


class _Older:
    """torch before 2.13, whose FSDP2 has no setting for unused parameters."""

    def __enter__(self) -> None:
        self._setting = FSDPModule.set_reduce_scatter_unused_params
        del FSDPModule.set_reduce_scatter_unused_params

    def __exit__(self, *error: object) -> None:
        FSDPModule.set_reduce_scatter_unused_params = self._setting  # type: ignore[method-assign]


def _train(rank: int, world_size: int) -> dict[str, list[Tensor]]:
    results = {}
    for name, torch_of in (("newer", nullcontext()), ("older", _Older())):
        torch.manual_seed(0)
        net = Sometimes()
        prepared = prepare(net, LoCo(block_size=32, exempt=()), SyncOptions(), scatter=True)
        fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
        with torch_of:
            attached = attach_fsdp(net, prepared, device=torch.device("cpu"))
        group = fsdp_sharding.sharded_groups(net)[0].param_group
        assert group.reduce_scatter_unused_params == (name == "newer")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(5):
            attached.begin_step()
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 16, generator=generator)
            for micro in range(2):  # the first is accumulated
                net.set_requires_gradient_sync(micro == 1)
                net(x, all_of_it=step % 2 == 0 and rank == 0 and micro == 0).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            attached.end_step()
        results[name] = [param.detach().full_tensor() for param in net.parameters()]
    return results


def test_older_and_newer_torch_train_alike() -> None:
    for results in run_ranks(_train, 2):
        for older, newer in zip(results["older"], results["newer"], strict=True):
            assert torch.equal(older, newer)
