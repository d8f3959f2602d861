"""Bytes, collectives and memory of real ranks over gloo are those of the plan, for every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import PRESETS, DiLoCo, Exact, LoCo, as_weights
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.plan.messages import TransferGroup, step_nbytes
from lowbit_strategy.plan.running import plan_of
from testing.counting.traffic import count_traffic
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, scenarios

WIDTH, CPU = 64, torch.device("cpu")
STEPS = 3


def net() -> nn.Sequential:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, 32)]
    return nn.Sequential(*layers)


class Calls(NamedTuple):
    """Of `torch.distributed`, in a step or a round."""

    nbytes: int
    collectives: int


def planned(transfers: tuple[TransferGroup, ...]) -> Calls:
    messages = [(transfer.repeats, message) for transfer in transfers for message in transfer.messages]
    return Calls(
        sum(repeats * message.total_nbytes for repeats, message in messages),
        sum(repeats * message.in_series for repeats, message in messages),
    )


def measure(session: Any, step: Any, steps: int = 1) -> Facts:
    """The last step, or round, counted where torch.distributed is called."""
    for _ in range(STEPS * steps):
        step()
    sync = session.sync
    peers = sync.ranks.peers.sent_nbytes
    with count_traffic() as traffic:
        for _ in range(steps):
            step()
    plan = plan_of(sync)
    ours = plan.gradients + plan.rounds
    if plan.coding != Exact():  # FSDP2 gathers exact weights by itself: its hook counts them
        ours += plan.weights
    facts = {
        "counted": Calls(traffic.nbytes, sum(traffic.calls.values())),
        "planned": planned(ours),
        "peers": sync.ranks.peers.sent_nbytes - peers,
        "promised": plan.sent_nbytes,
        "series": plan.in_series,
        "buckets": len(plan.gradients),
        "weights": None if sync.weights is None else sync.weights.step_nbytes,
        "planned weights": step_nbytes(plan.weights),
        "residuals": sync.state.nbytes,
        "planned residuals": memory_of(plan).residuals,
    }
    session.close()
    return facts


def training(model: nn.Module, session: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        session.begin_step()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        session.end_step(optimizer)

    return step


def ddp(folder: Path, name: str, nodes: int) -> Facts:
    options = {"outer": DiLoCo(every=4, fragments=2)} if name == "diloco" else {}
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None) if name == "diloco" else PRESETS[name]
    with nodes_of(nodes):
        module = net()
        prepared = prepare(module, compressor, SyncOptions(check_digest=False, **options), scatter=False)
        model = DistributedDataParallel(module, bucket_cap_mb=0.01)
        session = attach_ddp(model, prepared, device=CPU)
        return measure(session, training(model, session), 4 if options else 1)


@scenarios(ddp, world_size=4, name=("loco", "dense", "powersgd", "diloco"), nodes=(1, 2))
def test_ddp_sends_what_is_planned(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["counted"] == rank["planned"]
        assert rank["residuals"] == rank["planned residuals"]


@scenarios(ddp, world_size=4, name=("loco",), nodes=(1,))
def test_loco_waits_for_two_messages(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["series"] == 2
        assert rank["counted"].collectives == 2 * rank["buckets"]


def fsdp(folder: Path, weights: str, nodes: int) -> Facts:
    with nodes_of(nodes):
        module = net()
        options = SyncOptions(check_digest=False, weights=as_weights(weights))
        prepared = prepare(module, LoCo(block_size=32), options, scatter=True)
        mesh = init_device_mesh("cpu", (4,))
        for child in (*module, module):
            fully_shard(child, mesh=mesh)
        session = attach_fsdp(module, prepared, device=CPU)
        return measure(session, training(module, session))


@scenarios(fsdp, world_size=4, weights=("exact", "code8", "code4", "delta4"), nodes=(1, 2))
def test_fsdp_sends_what_is_planned(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["counted"] == rank["planned"]
        assert rank["residuals"] == rank["planned residuals"]
        promised = rank["planned weights"]
        assert promised <= rank["weights"] < promised * 1.1 + 2048  # headers and padding


def hsdp(folder: Path, weights: str, outer: bool) -> Facts:
    with nodes_of(2):
        module = net()
        rule = DiLoCo(every=4) if outer else None
        options = SyncOptions(check_digest=False, shard_size="node", outer=rule, weights=as_weights(weights))
        prepared = prepare(module, LoCo(block_size=32, beta=0.0, reset_steps=None), options, scatter=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))["shard"]
        for child in (*module, module):
            fully_shard(child, mesh=mesh)
        session = attach_fsdp(module, prepared, device=CPU)
        facts = measure(session, training(module, session), 4 if outer else 1)
        return facts | {"outer": outer}


@scenarios(hsdp, world_size=4, weights=("exact", "code8"), outer=(False, True))
def test_hsdp_sends_what_is_planned(facts: list[Facts]) -> None:
    for rank in facts:
        if rank["outer"]:  # four steps inside the node, one round between nodes
            assert rank["promised"] < rank["peers"] < rank["promised"] * 1.2 + 4096
        else:
            assert rank["counted"] == rank["planned"]
