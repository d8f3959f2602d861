"""Models whose ranks are a part of the world: groups that members make alone do not disturb anybody else's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Auto, LoCo
from lowbit_strategy.attach.session import Session
from lowbit_strategy.custom_loop import compress
from testing.processes.ranks import run_ranks

LOCO = LoCo(block_size=32)


def _net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(num_steps):
        x = torch.randn(8, 32, generator=generator)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()


def _whole(model: nn.Module) -> list[float]:
    params: list[Any] = list(model.parameters())
    return [float((p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double().sum()) for p in params]


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _ddp(group: dist.ProcessGroup | None, seed: int = 0) -> tuple[Session, nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(_net(seed), process_group=group)
    optimizer = _sgd(model)
    return compress(model, optimizer, LOCO), model, optimizer


def _all_can_talk(group: dist.ProcessGroup | None) -> float:
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    return x.item()


def _alone(members: list[int]) -> Any:
    return dist.new_group(members, use_local_synchronization=True)


def _some_compress(rank: int, world_size: int) -> dict[str, Any]:
    """Ranks 1 and 2 of four, twice, in groups made in each of torch's ways; then all make groups in each of them."""
    by_all = [dist.new_group(members) for members in ([1, 2], [0, 3])][rank in (0, 3)]
    by_members = _alone([1, 2] if rank in (1, 2) else [0, 3])  # torch counts groups in these names: all have made two
    found: dict[str, Any] = {}
    if rank in (1, 2):
        for at, group in enumerate((by_all, by_members)):
            session, *trained = _ddp(group, seed=at)
            _train(*trained)
            found[f"weights {at}"] = _whole(trained[0])
            if at == 0:  # the second stays open while others make groups
                session.close()
    found["by all"] = _all_can_talk(dist.new_group(list(range(4))))
    found["by members"] = _all_can_talk(_alone(list(range(4))))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    found["mesh"] = _all_can_talk(mesh["a"].get_group()) + _all_can_talk(mesh["b"].get_group())
    if rank > 1:  # another part, which the first one's groups overlap
        _, *trained = _ddp(_alone([2, 3]))
        _train(*trained)
        found["weights 2"] = _whole(trained[0])
    _, *trained = _ddp(None)
    _train(*trained)
    return found | {"weights 3": _whole(trained[0])}


def test_some_ranks_compress_and_all_make_groups_afterwards() -> None:
    ranks = run_ranks(_some_compress, 4)
    for rank in ranks:
        assert (rank["by all"], rank["by members"], rank["mesh"]) == (4.0, 4.0, 4.0)
        assert rank["weights 3"] == ranks[0]["weights 3"]
    for key in ("weights 0", "weights 1"):
        assert ranks[1][key] == ranks[2][key]
    assert ranks[2]["weights 2"] == ranks[3]["weights 2"]


def _disjoint(rank: int, world_size: int) -> dict[str, Any]:
    """Two groups train two models at the same time, one of which begins twice."""
    group = _alone([0, 1] if rank < 2 else [2, 3])
    session, model, optimizer = _ddp(group, seed=rank // 2)
    _train(model, optimizer, 3 if rank < 2 else 5)
    if rank < 2:
        session.close()
        session, model, optimizer = _ddp(group, seed=7)
        _train(model, optimizer)
    return {"weights": _whole(model), "all": _all_can_talk(dist.new_group(list(range(4))))}


def test_two_groups_at_the_same_time() -> None:
    ranks = run_ranks(_disjoint, 4)
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[2]["weights"] == ranks[3]["weights"]
    assert ranks[0]["weights"] != ranks[2]["weights"]
    assert [rank["all"] for rank in ranks] == [4.0] * 4


def _hsdp_on_a_part(rank: int, world_size: int, compressor: Any) -> dict[str, Any]:
    """Ranks 1 to 4 of five have a model of two shards twice; rank 0 has nothing to do with it."""
    part = [1, 2, 3, 4]
    mesh = DeviceMesh("cpu", [[1, 2], [3, 4]], mesh_dim_names=("replicate", "shard"))
    found: dict[str, Any] = {}
    if rank in part:
        net = _net(0)
        fully_shard(net, mesh=mesh)
        optimizer = _sgd(net)
        compress(net, optimizer, compressor, shard_size=2)
        _train(net, optimizer)
        found["weights"] = _whole(net)
    return found | {"all": _all_can_talk(dist.new_group(list(range(5))))}


def test_hsdp_on_a_part_of_the_world() -> None:
    for compressor in (LOCO, Auto()):
        ranks = run_ranks(_hsdp_on_a_part, 5, compressor)
        assert [rank["all"] for rank in ranks] == [5.0] * 5
        assert all(rank["weights"] == ranks[1]["weights"] for rank in ranks[1:])
