"""Memory and bytes beside the gradients: what the start-up report announces is what a run takes."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Exact, LoCo, as_weights
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.kernels.digest import digests
from lowbit_strategy.plan.messages import step_nbytes
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.telemetry.observe import Observer
from testing.processes.scenarios import Facts, scenarios

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
    session = attach_fsdp(net, prepared, device=torch.device("cpu"))
    sync = session.sync
    announced = plan_of(sync)
    observer = Observer(sync, wants=lambda step: True)
    for _ in range(3):
        session.begin_step()
        net(torch.randn(4, WIDTH)).square().mean().backward()
        session.end_step()
    held = sync.buffers.nbytes
    session.close()
    assert observer.last is not None
    return {
        "held": held,
        "observed": observer.last.weights_nbytes,
        "announced": memory_of(announced).temporary,
        "module": world_size * sum(sync.state.sent_nbytes(name) for name in ("0.weight", "0.bias")) // (world_size - 1),
        "weights": step_nbytes(announced.weights),
        "counted": sync.weights.step_nbytes,
        "parameters": sum(spec.numel for spec in sync.specs.values()),
    }


def in_buckets(folder: Path) -> Facts:
    """DDP, of which all buckets may be under way at the same time, and whose first step has a single one."""
    net = nn.Sequential(*(nn.Linear(4 * WIDTH, 4 * WIDTH) for _ in range(NUM_MODULES)))
    prepared = prepare(net, LoCo())
    model = DistributedDataParallel(net, bucket_cap_mb=0.5)
    session = attach_ddp(model, prepared)
    held = []
    for _ in range(6):
        session.begin_step()
        model(torch.randn(4, 4 * WIDTH)).square().mean().backward()
        held.append(session.sync.buffers.nbytes)
        session.end_step()
    facts = {"held": max(held), "announced": memory_of(plan_of(session.sync)).temporary}
    session.close()
    return facts


@scenarios(in_buckets)
def test_buckets_hold_no_more_for_messages_than_is_announced(facts: list[Facts]) -> None:
    for rank in facts:
        assert 0 < rank["held"] <= rank["announced"]


def _held_nbytes() -> int:
    """Bytes of all tensors of this process, each memory once."""
    gc.collect()
    storages = {
        storage.data_ptr(): storage.nbytes()
        for each in gc.get_objects()
        if type(each) is torch.Tensor
        for storage in (each.untyped_storage(),)
    }
    return sum(storages.values())


def beyond_fsdp(folder: Path, weights: str) -> Facts:
    """What a rank holds between steps that it does not hold under FSDP2 alone."""
    held = {}
    digests([torch.zeros(1)], torch.device("cpu"))  # has a table of 1 MiB, once per process
    for name in ("stock", weights):
        torch.manual_seed(0)
        before = _held_nbytes()
        net = nn.Sequential(*(nn.Linear(8 * WIDTH, 8 * WIDTH) for _ in range(NUM_MODULES)))
        chosen = SyncOptions(weights=as_weights(weights)) if name != "stock" else None
        prepared = None if chosen is None else prepare(net, LoCo(), chosen, scatter=True)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*net, net):
            fully_shard(module, mesh=mesh)
        session = None if prepared is None else attach_fsdp(net, prepared, device=torch.device("cpu"))
        for _ in range(2):
            if session is not None:
                session.begin_step()
            net(torch.randn(4, 8 * WIDTH)).square().mean().backward()
            net.zero_grad()
            if session is not None:
                session.end_step()
        held[name] = _held_nbytes() - before
        if session is not None:
            memory = memory_of(plan_of(session.sync))
            kept = memory.weights
            announced = memory.residuals + memory.copies + memory.temporary + kept
            session.close()
        del net, module, prepared, session
    return {"measured": held[weights] - held["stock"], "announced": announced, "kept": kept}


@scenarios(beyond_fsdp, weights=("exact", "code8", "delta4"))
def test_memory_beyond_that_of_fsdp_is_what_the_report_announces(facts: list[Facts]) -> None:
    for rank in facts:
        assert abs(rank["measured"] / rank["announced"] - 1) < 0.05


@scenarios(sharded)
def test_memory_for_messages_is_that_of_one_module(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["held"] == rank["announced"]
        assert rank["held"] <= 2 * rank["module"] + 1024  # sent and received; headers and padding


@scenarios(sharded)
def test_bytes_of_weights_are_announced(facts: list[Facts]) -> None:
    """Each module's weights are gathered in forward and again in backward, half of them from the other rank."""
    for rank in facts:
        assert rank["weights"] == rank["counted"] == rank["observed"] == 2 * rank["parameters"] * 4 // 2
