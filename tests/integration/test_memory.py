"""Memory and bytes beside the gradients: what the start-up report announces is what a run takes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowbit_strategy import Exact, LoCo
from lowbit_strategy.hooks.attach import attach_fsdp, prepare
from lowbit_strategy.hooks.sync_options import SyncOptions
from lowbit_strategy.telemetry.startup_report import build_report
from tests.scenarios import Facts, scenarios

WIDTH, NUM_MODULES = 96, 6


def sharded(folder: Path) -> Facts:
    """Equal modules, sharded one by one, so that their messages take turns in the same memory."""
    world_size = dist.get_world_size()
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_MODULES)))
    prepared = prepare(net, LoCo(), SyncOptions(weights=Exact()), scatter=True)
    mesh = init_device_mesh("cpu", (world_size,))
    for module in net:
        fully_shard(module, mesh=mesh)
    fully_shard(net, mesh=mesh)
    attached = attach_fsdp(net, prepared, device=torch.device("cpu"))
    sync = attached.sync
    announced = build_report(sync)
    for _ in range(3):
        net(torch.randn(4, WIDTH)).square().mean().backward()
        attached.end_step()
    held = sync.buffers.nbytes
    attached.close()
    return {
        "held": held,
        "announced": announced.buffer_nbytes,
        "module": world_size * sum(sync.sent_nbytes(name) for name in ("0.weight", "0.bias")) // (world_size - 1),
        "weights": announced.weights.used.step_nbytes,
        "counted": sync.weights.nbytes,
        "parameters": sum(spec.numel for spec in sync.specs.values()),
    }


@scenarios(sharded)
def test_memory_for_messages_is_that_of_one_module(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["held"] == rank["announced"]
        assert rank["held"] <= 2 * rank["module"] + 1024  # sent and received; headers and padding


@scenarios(sharded)
def test_bytes_of_weights_are_announced(facts: list[Facts]) -> None:
    """Each module's weights are gathered in forward and again in backward, half of them from the other rank."""
    for rank in facts:
        assert rank["weights"] == rank["counted"] == 2 * rank["parameters"] * 4 // 2
