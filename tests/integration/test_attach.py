"""Attaching to a model and letting go of it: what is refused, what ranks agree on, what is given back."""

from __future__ import annotations

import functools
import gc
import os
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowbit_strategy import LocalSGD, LoCo
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.custom_loop import compress
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, none, raised, scenarios
from testing.training.ddp_loop import CPU, Loop
from testing.training.plain import COMPRESSORS, batch, local_values, wrap
from testing.training.regression import KINDS, WIDTH, Kind, Regression, fit, mlp

# -- what is refused --------------------------------------------------------------------------------------------------


def sparse_embedding(folder: Path, kind: Kind) -> Facts:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.net = nn.Embedding(10, WIDTH, sparse=True), mlp()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x + self.table(torch.zeros(len(x), dtype=torch.int64)))

    return {"error": raised(lambda: fit(kind, Regression(Tokens(), optimizer="plain")))}


@scenarios(sparse_embedding, kind=KINDS)
def test_sparse_gradients_are_refused_before_training(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["error"].startswith("ValueError: net.table is an Embedding with sparse=True")


def one_scaler(folder: Path) -> Facts:
    return {"error": raised(lambda: Loop(mlp(), has_scaler=dist.get_rank() == 1))}


@scenarios(one_scaler)
def test_a_gradient_scaler_on_one_rank_only(facts: list[Facts]) -> None:
    for rank in facts:
        assert "RuntimeError: rank 1 differs from rank 0 in gradient scaler: one instead of none" in rank["error"]


def join(folder: Path) -> Facts:
    loop = Loop(mlp())

    def uneven() -> None:
        with Join([loop.model]):
            for _ in range(1 + dist.get_rank()):
                loop.step()

    return {"error": raised(uneven)}


@scenarios(join)
def test_uneven_inputs_are_refused(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["error"].startswith("RuntimeError: torch.distributed.algorithms.Join does not work")


def other_ranks(folder: Path) -> Facts:
    """FSDP2 over several meshes: other ranks in a part of the model, or replicated there as well."""
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    one = init_device_mesh("cpu", (dist.get_world_size(),))
    meshes = {"part": (both["shard"], one), "replicated": (both, one)}
    errors = {}
    for name, (inner, outer) in meshes.items():
        net = mlp()
        prepared = prepare(net, LoCo(), SyncOptions(), scatter=True)
        fully_shard(net[2], mesh=inner)
        fully_shard(net, mesh=outer)
        errors[name] = raised(functools.partial(attach_fsdp, net, prepared, device=CPU))
    return errors


@scenarios(other_ranks)
def test_fsdp2_over_other_ranks_is_refused(facts: list[Facts]) -> None:
    for rank, own in enumerate(facts):
        assert f"module 2 is sharded over the ranks [{rank}] and the model over [0, 1]" in own["part"]
        assert "module 2 is replicated, too, and the rest of the model is sharded (HSDP)" in own["replicated"]


# -- what is reported ----------------------------------------------------------------------------------------------


def mistyped(folder: Path, kind: Kind) -> Facts:
    compressor = LoCo(block_size=32, exempt=("@vector", "nett.*"))
    with listen() as lines:
        fit(kind, Regression(), options={"compressor": compressor}, max_steps=3)
    return {"lines": [line for line in lines if "nett" in line and "matches no parameter" in line]}


@scenarios(mistyped, kind=KINDS)
def test_a_pattern_that_matches_nothing_is_reported_once(facts: list[Facts]) -> None:
    assert facts[0]["lines"] == [
        "exempt: 'nett.*' matches no parameter of the model. Its parameters are net.0.weight, net.0.bias,"
        " net.2.weight, net.2.bias and 2 more"
    ]
    assert facts[1]["lines"] == []


# -- loops of one's own that forget something -------------------------------------------------------------------------


def refused(folder: Path, kind: str) -> Facts:
    net = mlp()
    attach: Any = attach_fsdp if kind == "fsdp" else attach_ddp
    prepared = prepare(net, LoCo(), scatter=kind == "fsdp")
    error = raised(lambda: attach(net, prepared))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(batch(0)).square().mean().backward()
    return {"error": error, "step": raised(optimizer.step)}


@scenarios(refused, kind=("ddp", "fsdp"))
def test_a_refused_model_can_be_trained_without_compression(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["error"].startswith("ValueError: ")
        assert rank["step"] == ""


def forgetful(folder: Path) -> Facts:
    loop = Loop(mlp(), shape=(WIDTH,))
    return {"error": raised(loop.backward)}


@scenarios(forgetful)
def test_a_step_that_is_not_begun_is_an_error(facts: list[Facts]) -> None:
    assert "gradients arrived before the step had begun" in facts[0]["error"]


# -- memory order -----------------------------------------------------------------------------------------------------


def memory_order(folder: Path) -> Facts:
    """Saved with a model in channels_last, loaded into one in order, and back."""

    def loop(memory_format: torch.memory_format) -> Loop:
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=memory_format)
        compressor = LoCo(block_size=32, residual="float32", exempt=("@vector",))
        return Loop(net, compressor, shape=(3, 8, 8))

    orders, unsent = [], {"0.weight": [], "2.weight": []}
    path, stamp = folder / "one.ckpt", None
    for memory_format in (torch.channels_last, torch.contiguous_format, torch.channels_last):
        made = loop(memory_format)
        if stamp is None:
            for _ in range(3):
                made.step()
        else:
            made.session.load(path, stamp)
        sync = made.session.sync
        orders.append(sync.specs["0.weight"].memory_order)
        for name in unsent:
            spec, values = sync.specs[name], sync.state.export_unsent(name)
            out, inner, height, width = spec.shape
            in_order = values.view(spec.shape)
            if memory_format == torch.channels_last:
                in_order = values.view(out, height, width, inner).permute(0, 3, 1, 2)
            unsent[name].append(in_order)
        with made.session.save(path) as stamp:
            pass
    return {"orders": orders, "unsent": unsent}


@scenarios(memory_order)
def test_residuals_follow_the_memory_order_of_parameters(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["orders"] == [(0, 2, 3, 1), None, (0, 2, 3, 1)]
        for saved, *loaded in rank["unsent"].values():
            assert saved.any()
            assert len(loaded) == 2
            for values in loaded:
                torch.testing.assert_close(values, saved)


# -- many attachments in one process ----------------------------------------------------------------------------------


def _held() -> dict[str, int]:
    time.sleep(0.2)  # a thread may still be at the last bucket
    gc.collect()
    return {kind: len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")}


def _sharded(mesh: DeviceMesh) -> weakref.ref[nn.Module]:
    """A few steps of a model that FSDP2 shards, which nobody holds afterwards."""
    model = wrap("fsdp", mlp(), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compress(model, optimizer, LoCo(block_size=32))
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return weakref.ref(model)


def many(folder: Path, how: str) -> Facts:
    held, models = {}, []
    mesh = init_device_mesh("cpu", (2, 1) if how == "hsdp" else (2,), mesh_dim_names=("r", "s")[-1 - (how == "hsdp") :])
    for at in range(20):
        if how == "fit":
            fit("ddp", Regression(), max_steps=2)
        elif how in ("fsdp", "hsdp"):
            models.append(_sharded(mesh))
        else:
            loop = Loop(mlp(), options=SyncOptions(outer=LocalSGD(every=2) if how == "rounds" else None))
            for _ in range(3):
                loop.step()
            del loop
        if at in (4, 19):
            held[at] = _held()  # collecting what nobody holds takes half a second
    return {"held": held, "models": sum(model() is not None for model in models)}


@scenarios(many, how=("fit", "loop", "rounds", "fsdp", "hsdp"), slow=all_but(how=("loop", "rounds", "hsdp")))
def test_attachments_give_back_their_models_threads_and_descriptors(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["models"] == 0
        assert rank["held"][19] == rank["held"][4]


def torn_down(folder: Path) -> Facts:
    """The default group is destroyed first; a second close is none."""
    loop = Loop(mlp())
    loop.step()
    dist.barrier()
    dist.destroy_process_group()
    errors = [raised(loop.session.close), raised(loop.session.close)]
    return {"errors": errors, "step_index": loop.session.sync.step_index}


@scenarios(torn_down)
def test_closing_after_the_default_group_is_gone(facts: list[Facts]) -> None:
    assert facts[0] == {"errors": ["", ""], "step_index": 1}


def without_gradients(folder: Path, kind: str) -> Facts:
    """Weights after two steps, where gradients were on and off as compression was attached."""
    trained = []
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        model = wrap(kind, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with context():
            session = compress(model, optimizer, COMPRESSORS["loco"])
        for step in range(2):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        trained.append(local_values(model.parameters()))
        session.close()
    return {"same": [all(map(torch.equal, trained[0], each)) for each in trained]}


@scenarios(without_gradients, kind=("ddp", "fsdp"), slow=none)
def test_compression_may_be_attached_where_gradients_are_off(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"] == [True] * 3
