"""What happens to a model beside training: it is copied, loaded, closed and attached again, wrapped in other ways."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.optim.swa_utils import AveragedModel

from lowbit_strategy import Dense, LoCo
from lowbit_strategy.attach.session import Session
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, attach_fsdp, prepare
from testing.processes.ranks import run_ranks

LOCO = LoCo(block_size=32)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def _step(session: Session | None, model: nn.Module, seed: int) -> None:
    """SGD by hand of new optimizers keeps nothing between steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))
    optimizer.zero_grad()
    if session is not None:
        session.begin_step()
    (model(x) - x).square().mean().backward()
    optimizer.step()
    if session is not None:
        session.end_step(optimizer)


def _weights(model: nn.Module) -> list[torch.Tensor]:
    params: list[Any] = list(model.parameters())
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in params]


def _equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(_weights(a), _weights(b), strict=True))


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "none"


def _ddp(net: nn.Module) -> tuple[Session, DistributedDataParallel]:
    prepared = prepare(net, LOCO)
    model = DistributedDataParallel(net)
    return attach_ddp(model, prepared), model


def _under_ddp(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    session, model = _ddp(_net())
    _step(session, model, 0)

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), torch.load(buffer, weights_only=False), AveragedModel(model).module]
    found["copies"] = [_equal(model, each) for each in copies]
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    for each in (plain, *copies):
        _step(None, each, 1)
    found["copies train as stock does"] = [_equal(plain, each) for each in copies]
    _step(session, model, 1)
    found["differs from stock"] = not _equal(plain, model)

    session.close()
    found["closed"] = _error(lambda: _step(None, model, 2))
    session = attach_ddp(model, prepare(model.module, Dense()))
    plain = DistributedDataParallel(copy.deepcopy(model.module))
    _step(session, model, 3)
    _step(None, plain, 3)
    found["attached again"] = max(
        float((a - b).abs().max()) for a, b in zip(_weights(model), _weights(plain), strict=True)
    )
    model.module.load_state_dict({k: v.clone() for k, v in model.module.state_dict().items()}, assign=True)
    found["assigned"] = _error(lambda: _step(session, model, 4))

    session, model = _ddp(_net())
    model.module[2] = nn.Linear(64, 32)
    found["replaced"] = _error(lambda: _step(session, model, 0))

    session, model = _ddp(nn.Sequential(*_net(), *_net().requires_grad_(False)))
    model.module.load_state_dict(
        {k: v.clone() for k, v in model.module.state_dict().items() if k[0] in "35"}, assign=True, strict=False
    )
    found["frozen ones assigned"] = _error(lambda: [_step(session, model, at) for at in range(3)])  # digest after 2

    session, model = _ddp(_net())
    found["twice"] = _error(lambda: attach_ddp(model, prepare(model.module, LOCO)))
    found["goes on"] = _error(lambda: _step(session, model, 0))

    net = _net()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    found["ignored"] = list(_ddp(net)[0].sync.specs)

    net = _net()
    prepared, model = prepare(net, LOCO), DistributedDataParallel(net)
    model.mixed_precision = _MixedPrecision(param_dtype=torch.bfloat16)  # given to it, torch for CUDA needs a driver
    found["mixed"] = _error(lambda: attach_ddp(model, prepared))

    net = _net()
    prepared, model = prepare(net, LOCO), DistributedDataParallel(net)
    model.register_comm_hook(None, allreduce_hook)
    found["hooked"] = _error(lambda: attach_ddp(model, prepared))
    return found


def test_under_ddp() -> None:
    for found in run_ranks(_under_ddp, 2):
        assert found["copies"] == found["copies train as stock does"] == [True] * 3
        assert found["differs from stock"]
        assert "session that compressed this model's gradients was closed" in found["closed"]
        assert found["attached again"] < 1e-6
        assert "0.weight is not the parameter that the model had when it was set up" in found["assigned"]
        assert "2.weight is not the parameter that the model had when it was set up" in found["replaced"]
        assert found["frozen ones assigned"] == "none"
        assert "compression is attached to this DistributedDataParallel already" in found["twice"]
        assert found["goes on"] == "none"
        assert found["ignored"] == ["0.bias", "2.weight", "2.bias"]
        assert "DistributedDataParallel(mixed_precision=...) reduces gradients in" in found["mixed"]
        assert "already has a communication hook (allreduce_hook)" in found["hooked"]


def _sharded(shard_size: int | None = None, compressor: Any = LOCO) -> tuple[Session, nn.Module]:
    net = _net()
    prepared = prepare(net, compressor, SyncOptions(shard_size=shard_size), scatter=True)
    world_size = dist.get_world_size()
    shape: tuple[int, ...] = (world_size,)
    names: tuple[str, ...] = ("shard",)
    if shard_size is not None:
        shape, names = (world_size // shard_size, shard_size), ("replicate", "shard")
    fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    return attach_fsdp(net, prepared), net


def _stock() -> nn.Module:
    net = _net()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net


def _under_fsdp(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    (session, model), (other, same) = _sharded(), _sharded()
    for at in range(4):
        if at == 2:
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        _step(session, model, at)
        _step(other, same, at)
    found["assigned"] = _equal(model, same)

    session, model = _sharded(None, Dense())
    stock = _stock()
    session.close()
    for at in range(2):
        _step(None, model, at)
        _step(None, stock, at)
    found["closed"] = _equal(model, stock)
    with torch.no_grad():
        model(torch.zeros(1, 32))  # leaves the outermost module gathered
    session = attach_fsdp(model, prepare(_net(), LOCO, scatter=True))
    _step(session, model, 2)
    found["attached again"] = session.sync.ranks.peers.sent_nbytes > 0

    session, model = _sharded()
    model[2] = nn.Linear(64, 32)  # type: ignore[index, operator]
    found["replaced"] = _error(lambda: _step(session, model, 0))
    found["replaced before"] = _error(lambda: attach_fsdp(model, prepare(_net(), LOCO, scatter=True)))

    net = _net()
    prepared = prepare(net, LOCO, scatter=True)
    fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)), ignored_params={net[0].weight})
    found["ignored"] = _error(lambda: attach_fsdp(net, prepared))

    from torch.distributed._composable.replicate_with_fsdp import replicate

    net = _net()
    prepared = prepare(net, LOCO, scatter=True)
    replicate(net, mesh=init_device_mesh("cpu", (world_size,)))
    found["replicate"] = _error(lambda: attach_fsdp(net, prepared))
    return found


def test_under_fsdp() -> None:
    for found in run_ranks(_under_fsdp, 2):
        assert found["assigned"]
        assert found["closed"]
        assert found["attached again"]
        assert "was sharded with parameters that it no longer has" in found["replaced"]
        assert "was sharded with parameters that it no longer has" in found["replaced before"]
        assert "0.weight: fully_shard left it out (ignored_params)" in found["ignored"]
        assert "is replicated by torch.distributed's replicate" in found["replicate"]


def _micro_batches(rank: int, world_size: int, how: str) -> tuple[list[torch.Tensor], list[int]]:
    """HSDP, three micro-batches per step, all reduced between replicas, or the last one alone."""
    session, model = _sharded(2, Dense())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator, sent = torch.Generator().manual_seed(rank), []
    for _ in range(3):
        before = session.sync.ranks.peers.sent_nbytes
        optimizer.zero_grad()
        for micro in range(3):
            if how == "last":
                model.set_requires_all_reduce(micro == 2)  # type: ignore[operator]
            session.begin_step()
            x = torch.randn(8, 32, generator=generator)
            ((model(x) - x).square().mean() / 3).backward()
        optimizer.step()
        session.end_step(optimizer)
        sent.append(session.sync.ranks.peers.sent_nbytes - before)
    return _weights(model), sent


def test_only_the_last_micro_batch_is_reduced_between_replicas() -> None:
    (each, of_each), (last, of_last) = (run_ranks(_micro_batches, 4, how)[0] for how in ("each", "last"))
    assert of_each == [3 * nbytes for nbytes in of_last]
    for a, b in zip(each, last, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
