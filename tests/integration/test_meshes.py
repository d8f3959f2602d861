"""Models on a mesh of several dims: gradients are compressed over the data-parallel ones, read from the model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.utils.data import DataLoader, TensorDataset

from lowbit_strategy import Dense, DiLoCo, ExDyna, LoCo, TopK
from lowbit_strategy.control import Accordion
from lowbit_strategy.custom_loop import Session, adapt, compress, monitor
from lowbit_strategy.fabric import LowBitFSDPStrategy as FabricFSDPStrategy
from lowbit_strategy.lightning import LowBitFSDPStrategy
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.plan.startup_report import build_report
from testing.processes.ranks import run_ranks
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.meshes import (
    LAYOUTS,
    LOCO,
    WIDTH,
    Run,
    equal,
    local,
    net,
    place_in,
    tensor_parallel,
    unsent,
    wrapped,
)


def beside_stock(folder: Path, layout: str) -> Facts:
    """Stock, dense and LoCo."""
    weights, losses, planned = {}, {}, {}
    ways: dict[str, Any] = {"stock": None, "dense": Dense(), "loco": LOCO, "coded": LOCO}
    for way, compressor in ways.items():
        run, session = wrapped(layout), None
        if compressor is not None:
            options = {} if layout == "ddp" or way == "coded" else {"weights": "exact"}
            session = compress(run.model, run.optimizer, compressor, **options)
            planned[way] = sum(
                message.total_nbytes for each in plan_of(session.sync).gradients for message in each.messages
            )
            before = session.sync.ranks.peers.sent_nbytes
        losses[way] = run.train(session, 5)
        weights[way] = run.weights()
        if session is not None:
            counted = session.sync.ranks.peers.sent_nbytes - before
            facts = session.sync.ranks.topology, session.sync.ranks.everyone.world_size
            (dims,) = [line for line in build_report(session.sync).render().splitlines() if "mesh: " in line]
            session.close()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, (run.mesh.mesh.flatten().tolist(), weights["loco"]))
    return {
        "dense": equal(weights["stock"], weights["dense"]),
        "losses": losses,
        "bytes": (counted, 5 * planned["coded"]),
        "ranks": facts,
        "dims": dims.removeprefix("  mesh: "),
        "layout": layout,
        "everyone": everyone,
    }


DIMS = {
    "fsdp": "dp 2 x tp 2, compressed over dp",
    "hsdp": "replicate 2 x tp 2, compressed over replicate",
    "ddp": "dp 2 x tp 2, compressed over dp",
    "cp": "dp 2 x cp 2, compressed over dp_cp",
}


@scenarios(beside_stock, world_size=4, layout=LAYOUTS, slow=all_but(layout=LAYOUTS))
def test_beside_stock(facts: list[Facts]) -> None:
    for rank, each in enumerate(facts):
        few = len(each["everyone"][rank][0]) == 2  # of more ranks gloo adds in another order
        assert each["losses"]["dense"] == pytest.approx(each["losses"]["stock"], rel=0.0 if few else 1e-6)
        assert each["dense"] or not few
        for way in ("loco", "coded"):
            assert abs(each["losses"][way][-1] / each["losses"]["stock"][-1] - 1) < 0.02
        counted, planned = each["bytes"]
        assert counted == planned
        topology, num_all = each["ranks"]
        members, _ = each["everyone"][rank]
        assert (topology.world_size, num_all) == (len(members), 4)
        _, own = each["everyone"][rank]
        assert each["dims"] == DIMS[each["layout"]]
        if each["layout"] not in ("fsdp", "cp"):
            assert all(equal(own, each["everyone"][other][1]) for other in members)
        if few:  # a norm, which tensor parallelism replicates
            assert torch.equal(own[0], each["everyone"][rank ^ 1][1][0])


def loaded(run: Run, session: Session, folder: Path) -> None:
    path = folder / "checkpoint"
    model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    stamp = [torch.load(folder / "stamp.pt") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(stamp)
    session.load(path, stamp[0])
    session.resume()


def resumed(folder: Path, layout: str) -> Facts:
    """With a controller in the middle of its window; into other dims: the same ranks, tensor parallelism outermost;
    local steps in the middle of a round.
    """
    options: dict[str, Any] = {"outer": DiLoCo(every=3)} if layout == "local steps" else {}
    to = "tp" if layout == "other dims" else "dp"
    layout = {"other dims": "fsdp", "local steps": "hsdp"}.get(layout, layout)
    run = wrapped(layout)
    session = compress(run.model, run.optimizer, LOCO, **options)
    control = adapt(
        session.sync, Accordion(light=LOCO, heavy=LoCo(bits=2, block_size=32, exempt=()), interval=2, unit="steps")
    )
    monitor(session.sync, None, every_n_steps=2, record=folder)
    run.train(session, 4)
    path = folder / "checkpoint"
    with session.save(path) as stamp, session.shared_weights(validates=False):
        model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    if dist.get_rank() == 0:
        torch.save(stamp, folder / "stamp.pt")
    straight = run.train(session, 3, start=4)
    weights, levels = (place_in(run.mesh), session.sync.ranks.column, run.weights()), dict(control.levels)
    session.close()
    again = wrapped(layout, outermost=to)
    session = compress(again.model, again.optimizer, LOCO, **options)
    adapt(session.sync, Accordion(light=LOCO, heavy=LoCo(bits=2, block_size=32, exempt=()), interval=2, unit="steps"))
    loaded(again, session, folder)
    back = again.train(session, 3, start=4)
    place, column = place_in(again.mesh), session.sync.ranks.column
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, weights)
    at, before = next((at, each) for at, (*where, each) in enumerate(everyone) if where == [place, column])
    same = equal(before, again.weights())
    session.close()
    return {
        "losses": (straight, back),
        "same": same,
        "at": at,
        "levels": levels,
        "files": len(list(folder.glob("*.lowbit/*.pt"))),
    }


@scenarios(
    resumed, world_size=4, layout=("fsdp", "hsdp", "cp", "other dims", "local steps"), slow=all_but(layout="other dims")
)
def test_resumed(facts: list[Facts]) -> None:
    for rank in facts:
        _, back = rank["losses"]
        straight, _ = facts[rank["at"]]["losses"]
        assert straight == back
        assert rank["same"]
        assert rank["levels"] == facts[0]["levels"] != {}
        assert rank["files"] == 4


def before_and_after(
    rank: int, world_size: int, folder: Path, layout: str
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Of six ranks: saved; of four: loaded. What is unsent, and the norms that a controller has summed up."""
    run = wrapped(layout)
    light, heavy = (TopK(density=density, exempt=()) for density in (0.1, 0.01))
    session = compress(run.model, run.optimizer, light, on_world_size_change="fold")
    control = adapt(session.sync, Accordion(light=light, heavy=heavy, unit="steps", interval=9, gradient="mean"))
    path = folder / "checkpoint"
    if world_size == 6:
        run.train(session, 3)
        with session.save(path) as stamp:
            path.mkdir(exist_ok=True)
        if rank == 0:
            torch.save(stamp, folder / "stamp.pt")
    else:
        stamps = [torch.load(folder / "stamp.pt") if rank == 0 else None]
        dist.broadcast_object_list(stamps)
        session.load(path, stamps[0])
    found = unsent(session), control._window.read()["accumulated_norm"]
    session.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "ddp", "cp"])
def test_folded_into_fewer_data_parallel_ranks(tmp_path: Path, layout: str) -> None:
    """Each rank of a part of the model gets the mean of those that had this part, and nothing of the other part."""
    num_parts = 1 if layout == "cp" else 2
    saved, loaded = (run_ranks(before_and_after, size, tmp_path, layout, timeout=120) for size in (6, 4))
    before = [unsent for unsent, _ in saved]
    assert not torch.equal(before[0]["0.up.weight"], before[1]["0.up.weight"])
    for rank, (each, norms) in enumerate(loaded):
        assert each.keys() == before[0].keys() != set()
        assert norms == pytest.approx(saved[0][1], rel=1e-5)
        for name, values in each.items():
            mean = sum(old[name] for old in before[rank % num_parts :: num_parts]) / (6 / num_parts)
            torch.testing.assert_close(values, mean)


class Lit(L.LightningModule):
    """Parallelizes itself, and shards itself if it is told to, over the strategy's mesh or one that it makes."""

    def __init__(self, *, shards: bool = False, own_mesh: bool = False) -> None:
        super().__init__()
        self.net, self.shards, self.own_mesh, self.losses = net(), shards, own_mesh, list[float]()

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        if self.own_mesh:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
        tensor_parallel(self.net, mesh["tensor_parallel"], norms=True)  # torch clips on one mesh alone
        for part in (*self.net, self.net) if self.shards else ():
            fully_shard(part, mesh=mesh["data_parallel"])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[0].roll(1, 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", (self.net(batch[0]) - batch[0].roll(1, 1)).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(strategy: Any, model: Lit, folder: Path, checkpoint: Path | None = None, **options: Any) -> L.Trainer:
    """Seven clipped steps, four of which are an epoch."""
    batches = TensorDataset(torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(batches, batch_size=4)
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {
        "max_steps": 7,
        "gradient_clip_val": 0.5,
        "callbacks": [ModelCheckpoint(folder, every_n_train_steps=4)],
        **quiet,
        **options,
    }
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy, **options)
    trainer.fit(model, loader, loader if options.get("limit_val_batches") else None, ckpt_path=checkpoint)
    return trainer


def parts_of(model: nn.Module) -> list[Tensor]:
    return [local(param).clone() for param in model.parameters()]


SIZES: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 2}
LIGHTNING: dict[str, Any] = {
    "fsdp": lambda **also: (LowBitFSDPStrategy(LOCO, tensor_parallel_size=2, **also), Lit()),
    "hsdp": lambda **also: (LowBitFSDPStrategy(LOCO, tensor_parallel_size=2, shard_size=1, **also), Lit()),
    "name": lambda **also: ("loco_fsdp", Lit(shards=True, own_mesh=True)),
}


def lightning(folder: Path, layout: str, distributed: bool) -> Facts:
    """Fitted, without a break and from the checkpoint of an epoch's end; and in stock Lightning."""
    make = functools.partial(LIGHTNING[layout], **({"save_distributed_checkpoint": True} if distributed else {}))
    found: dict[str, Any] = {}
    stock = Lit(shards=True)
    fit(ModelParallelStrategy(**SIZES), stock, folder / "stock")
    dense = Lit(shards=True)
    fit(LowBitFSDPStrategy("dense", weights="exact", **SIZES), dense, folder / "dense")
    strategy, straight = make()
    fit(strategy, straight, folder / "straight", limit_val_batches=2)  # which changes nothing
    weights = parts_of(straight)
    strategy, again = make()
    trainer = fit(strategy, again, folder / "again", next((folder / "straight").glob("*step=4*")))
    found["losses"] = {"stock": stock.losses, "dense": dense.losses, "straight": straight.losses, "again": again.losses}
    found["same"] = equal(weights, parts_of(again))
    found["sampler"] = trainer.strategy.distributed_sampler_kwargs
    return found


@scenarios(
    lightning,
    world_size=4,
    layout=tuple(LIGHTNING),
    distributed=(False, True),
    slow=lambda layout, distributed, world_size: (layout, distributed) != ("name", False),
)
def test_lightning(facts: list[Facts]) -> None:
    for place, rank in enumerate(facts):
        losses = rank["losses"]
        assert losses["dense"] == losses["stock"]
        assert losses["straight"] == pytest.approx(losses["stock"], rel=0.05)
        assert losses["again"] == losses["straight"][4:]  # it goes on from the checkpoint
        assert rank["same"]
        assert rank["sampler"] == {"num_replicas": 2, "rank": place // 2}


def fabric(folder: Path) -> Facts:
    def parallelize(model: Any, mesh: DeviceMesh) -> Any:
        tensor_parallel(model, mesh["tensor_parallel"])
        return model

    def both(model: Any, mesh: DeviceMesh) -> Any:
        for part in (*parallelize(model, mesh), model):
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    sizes: dict[str, Any] = {"data_parallel_size": 2, "tensor_parallel_size": 2}
    losses: dict[str, list[float]] = {}
    for name, strategy in {
        "stock": FabricModelParallelStrategy(both, **sizes),
        "dense": FabricFSDPStrategy("dense", parallelize_fn=both, weights="exact", **sizes),
        "loco": FabricFSDPStrategy(LOCO, parallelize_fn=parallelize, tensor_parallel_size=2),
    }.items():
        made = L.Fabric(accelerator="cpu", devices=4, strategy=strategy)
        made.launch()
        model = made.setup_module(net())
        optimizer = made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        losses[name] = []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + made.global_rank // 2)
            x = torch.randn(4, WIDTH, generator=generator)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            made.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    made = L.Fabric(accelerator="cpu", devices=4, strategy="loco_fsdp")
    made.launch()
    loader = made.setup_dataloaders(DataLoader(TensorDataset(torch.arange(8)), batch_size=1))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    late = raised(lambda: made.setup_module(both(net(), mesh)))
    return {"losses": losses, "late": late, "sampled": len(loader)}


@scenarios(fabric, world_size=4)
def test_fabric(facts: list[Facts]) -> None:
    for rank in facts:
        losses = rank["losses"]
        assert losses["dense"] == losses["stock"]
        assert losses["loco"] == pytest.approx(losses["stock"], rel=0.05)
        assert rank["sampled"] == 2  # on all four ranks by themselves
        assert "data was split for 4 ranks, but on the model's mesh 2 ranks have" in rank["late"]


def refused(folder: Path) -> Facts:
    """Methods that select from a whole model, and columns that FSDP2 shards."""
    run = wrapped("fsdp")
    whole = raised(lambda: compress(run.model, run.optimizer, ExDyna(exempt=())))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    found = {}
    for dim in (0, 1):
        model = net()
        for part in (*model, model):
            fully_shard(part, mesh=mesh, shard_placement_fn=lambda param, dim=dim: Shard(min(dim, param.ndim - 1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def train(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            session = compress(model, optimizer, LOCO)
            Run(model, optimizer, mesh).train(session, 2)
            session.close()

        found[dim] = raised(train)
    return {"whole": whole, "columns": found}


@scenarios(refused, world_size=4)
def test_refused(facts: list[Facts]) -> None:
    for rank in facts:
        assert "selects from all parameters of a rank" in rank["whole"]
        assert rank["columns"][0] == ""
        assert "0.up.weight is sharded along dim 1" in rank["columns"][1]
