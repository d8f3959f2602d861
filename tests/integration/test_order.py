"""A training loop of one's own that calls in another order gets an error that names the mistake."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lowbit_strategy import DiLoCo, LocalSGD, LoCo
from lowbit_strategy.attach.mistakes import MANY_PASSES
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, attach_fsdp, prepare
from testing.log import listen
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.regression import WIDTH, mlp


def wrong_orders(folder: Path) -> Facts:
    net, other = mlp(), nn.Linear(3, 3)
    prepared, scattered = prepare(net, LoCo()), prepare(net, "loco2", scatter=True)
    model = DistributedDataParallel(net)
    return {
        "wrapped": raised(lambda: prepare(model, LoCo())),
        "parallel": raised(lambda: prepare(DataParallel(net), LoCo())),
        "unwrapped": raised(lambda: attach_ddp(net, prepared)),  # type: ignore[arg-type]
        "another": raised(lambda: attach_ddp(DistributedDataParallel(other), prepared)),
        "scattered": raised(lambda: attach_ddp(model, scattered)),
        "not scattered": raised(lambda: attach_fsdp(net, prepared)),
        "ddp for fsdp": raised(lambda: attach_fsdp(model, scattered)),
        "not sharded": raised(lambda: attach_fsdp(net, scattered)),
        "unknown": raised(lambda: prepare(net, "lcoo")),
    }


@scenarios(wrong_orders)
def test_wrong_orders_are_named(facts: list[Facts]) -> None:
    for rank in facts:
        assert "prepare was given a DistributedDataParallel: give it the bare model" in rank["wrapped"]
        assert "prepare was given a DataParallel: give it the bare model, and wrap it in Distr" in rank["parallel"]
        assert "attach_ddp was given a Sequential: give it what DistributedDataParallel returned" in rank["unwrapped"]
        assert (
            "attach_ddp and prepare were given different models: weight is [3, 3] in one and missing" in rank["another"]
        )
        assert "prepared with scatter=True, which is for attach_fsdp" in rank["scattered"]
        assert "the model was prepared for DDP: give prepare scatter=True" in rank["not scattered"]
        assert "attach_fsdp was given a DistributedDataParallel" in rank["ddp for fsdp"]
        assert "no module is sharded with fully_shard" in rank["not sharded"]
        assert "unknown compressor 'lcoo'; did you mean 'loco'" in rank["unknown"]


def steps_by_hand(folder: Path, local: bool) -> Facts:
    """Weights are updated without an optimizer: at first every step ends, then none does."""
    net = mlp()
    prepared = prepare(net, LoCo(), SyncOptions(outer=LocalSGD(every=2) if local else None))
    model = DistributedDataParallel(net)
    session = attach_ddp(model, prepared)
    logged = []
    for ends in (True, False):
        with listen() as lines:
            for _ in range(MANY_PASSES + 5):
                session.begin_step()
                model(torch.ones(2, WIDTH)).sum().backward()
                for param in net.parameters():
                    param.data.sub_(1e-4 * param.grad)
                    param.grad = None
                if ends:
                    session.end_step()
        logged.append([line for line in lines if "backward passes have come and no step has ended" in line])
    session.close()
    return {"logged": logged}


@scenarios(steps_by_hand, local=(False, True))
def test_steps_that_never_end_are_warned_of(facts: list[Facts]) -> None:
    (ended, not_ended), others = facts[0]["logged"], facts[1]["logged"]
    assert ended == []
    assert len(not_ended) == 1
    assert others == [[], []]


def replicas(folder: Path, shard_size: int) -> Facts:
    """Two ranks of one node, with local steps."""
    net = mlp()
    options = SyncOptions(shard_size=shard_size, outer=DiLoCo(every=2))
    with listen() as logged:
        prepared = prepare(net, LoCo(), options, scatter=True)
        shape = (dist.get_world_size() // shard_size, shard_size)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(net, mesh=mesh["shard"])
        session = attach_fsdp(net, prepared)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            session.begin_step()
            net(torch.randn(2, WIDTH)).sum().backward()
            optimizer.step()
            session.end_step(optimizer)
    sent = session.sync.ranks.peers.sent_nbytes
    session.finish()
    session.close()
    return {"logged": list(logged), "sent": sent}


@scenarios(replicas, shard_size=[2])
def test_one_replica_is_a_warning_with_what_to_do(facts: list[Facts]) -> None:
    assert facts[0]["sent"] == 0
    text = next(line for line in facts[0]["logged"] if "one replica" in line)
    assert text.startswith("lowbit_strategy: one replica")
    assert "nothing is compressed, and no steps are local" in text
    assert "LOCAL_WORLD_SIZE" in text


@scenarios(replicas, shard_size=[1])
def test_several_replicas_on_one_node(facts: list[Facts]) -> None:
    """What the warning advises: it compresses on one machine."""
    assert facts[0]["sent"] > 0
    assert not any("one replica" in line for line in facts[0]["logged"])
