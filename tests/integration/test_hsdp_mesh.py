"""HSDP that the user has sharded over a mesh of two dims: weights are gathered again as they were gathered before."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lowbit_strategy import LoCo, WeightCode
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, scenarios


def gathers(folder: Path, dims: int) -> Facts:
    """Two steps of an inner module that is freed between forward and backward."""
    with nodes_of(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 8))
        options = SyncOptions(shard_size=2, weights=WeightCode(keep="nothing"))
        prepared = prepare(net, LoCo(block_size=32), options, scatter=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        mesh = mesh if dims == 2 else mesh["shards"]
        for layer in net:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(net, mesh=mesh)
        attached = attach_fsdp(net, prepared, device=torch.device("cpu"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        states = set()
        losses = []
        for step in range(2):
            attached.begin_step()
            generator = torch.Generator().manual_seed(4 * step + torch.distributed.get_rank())
            x = net(torch.randn(4, 32, generator=generator))
            for layer in net:
                assert isinstance(layer, FSDPModule)
                states.add(layer._get_fsdp_state()._fsdp_param_group._sharded_state.name)
            losses.append(loss := x.square().mean())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            attached.end_step()
        weights = attached.sync.weights
        assert weights is not None
        return {
            "losses": [loss.item() for loss in losses],
            "states": states,
            "sent": {name: each.num_sent for name, each in weights.modules.items() if each.is_ours},
        }


@scenarios(gathers, dims=(1, 2), world_size=4)
def test_backward_gathers_coded_weights_too(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["states"] == {"SHARDED"}  # and no clone of a shard of what was gathered
        assert rank["sent"] == {"0": 4, "1": 4, "2": 4}
