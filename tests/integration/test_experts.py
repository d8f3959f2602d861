"""Experts on another mesh than the rest of a model: one session, which compresses over the ranks of each mesh."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lowbit_strategy import Auto, Dense, DiLoCo, ExDyna, LocalSGD, LoCo, TopK
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.control import Accordion
from lowbit_strategy.custom_loop import Session, adapt, compress, monitor
from lowbit_strategy.divergence.comparison import Comparison
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.engine.method_state import sum_of_known
from lowbit_strategy.fabric import LowBitFSDPStrategy as FabricFSDPStrategy
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.lightning import LowBitFSDPStrategy
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.plan.running import plans_of
from lowbit_strategy.telemetry.startup_report import startup_report
from testing.processes.node_size import nodes_of
from testing.processes.ranks import run_ranks
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.accelerated import fsdp_plugin, make
from testing.training.experts import LAYOUTS, WIDTH, Experts, MixtureOfExperts, distribute, wrap

LOCO = LoCo(block_size=32, exempt=())


def net(codec: Any = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MixtureOfExperts(), MixtureOfExperts(), nn.Linear(WIDTH, WIDTH))
    for part in model.modules() if codec is not None else ():
        if isinstance(part, MixtureOfExperts):
            part.codec = codec
    return model


class Run:
    """A wrapped model in training."""

    def __init__(self, layout: str, codec: Any = None) -> None:
        self.model = net(codec)
        wrap(self.model, layout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)  # several meshes

    def compress(self, compressor: Any = LOCO, **options: Any) -> Session:
        return compress(self.model, self.optimizer, compressor, **options)

    def train(self, num_steps: int, start: int = 0, *, clip: float | None = None, batches: int = 1) -> list[float]:
        losses = []
        for step in range(start, start + num_steps):
            for at in range(batches):
                generator = torch.Generator().manual_seed(1000 * step + 10 * at + dist.get_rank())
                x = torch.randn(4, 5, WIDTH, generator=generator)
                loss = (self.model(x) - x.roll(1, -1)).square().mean()
                loss.backward()
            if clip is not None:
                self.clip(clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def clip(self, largest: float) -> None:
        """Over all meshes: each rank has a part of every parameter that no other has."""
        grads = [local(param.grad) for param in self.model.parameters() if param.grad is not None]
        square = torch.stack([grad.square().sum() for grad in grads]).sum()
        dist.all_reduce(square)
        torch._foreach_mul_(grads, torch.clamp(largest / square.sqrt(), max=1.0))

    def weights(self) -> list[Tensor]:
        return [local(param).detach().clone() for param in self.model.parameters()]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True) if a.numel())


def beside_stock(folder: Path, layout: str) -> Facts:
    """Stock, dense and LoCo."""
    weights, facts = {}, dict[str, Any]()
    ways: dict[str, Any] = {"stock": None, "dense": Dense(), "loco": LOCO, "coded": LOCO}
    losses = facts["losses"] = {}
    for way, compressor in ways.items():
        run, session = Run(layout), None
        if compressor is not None:
            session = run.compress(compressor, **({} if way == "coded" else {"weights": "exact"}))
            before = [ranks.peers.sent_nbytes for ranks in session.sync.all_ranks]
        losses[way] = run.train(5, clip=1.0)
        weights[way] = run.weights()
        if session is not None:
            sync = session.sync
            sent = [ranks.peers.sent_nbytes - was for ranks, was in zip(sync.all_ranks, before, strict=True)]
            facts["sent"], facts["planned"] = sent, [5 * plan.sent_nbytes for plan in plans_of(sync)]
            facts["sizes"] = [ranks.world_size for ranks in sync.all_ranks]
            facts["experts"] = any("experts" in name for name in sync.specs)
            facts["report"] = startup_report(sync)
            session.close()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, weights["loco"])
    return facts | {"apart": apart(weights["stock"], weights["dense"]), "everyone": everyone}


@scenarios(beside_stock, world_size=4, layout=LAYOUTS, slow=all_but(layout=("module", "left out")))
def test_beside_stock(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"]["dense"] == pytest.approx(rank["losses"]["stock"], rel=2e-6)
        assert rank["apart"] < 2e-4  # a sum over four ranks has another order, and Adam divides by small numbers
        for way in ("loco", "coded"):
            assert abs(rank["losses"][way][-1] / rank["losses"]["stock"][-1] - 1) < 0.03
        assert rank["sizes"] == ([4, 2] if rank["experts"] else [4])
        for sent, planned in zip(rank["sent"], rank["planned"], strict=True):
            assert planned <= sent <= planned + 5 * 8 * 16 * 6
        assert rank["report"].count("compressed gradient") == len(rank["sizes"])
    assert facts[0]["losses"]["loco"] != facts[0]["losses"]["stock"]


def replicas(folder: Path) -> Facts:
    """HSDP: ranks with the same shards of the experts, and of the rest, keep them equal to the bit."""
    run = Run("hsdp")
    session = run.compress()
    run.train(4)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, run.weights())
    (comparison,) = (each for each in session.sync.listeners[StepPhase.RECORD] if isinstance(each, Comparison))
    comparison.compare(4)
    facts = {"compared": [len(names) for names, _ in comparison.compared()], "everyone": everyone}
    session.close()
    return facts


@scenarios(replicas, world_size=4)
def test_replicas_are_equal(facts: list[Facts]) -> None:
    for rank, each in enumerate(facts):
        assert all(each["compared"])
        assert len(each["compared"]) == 2
        assert all(map(torch.equal, each["everyone"][rank], each["everyone"][(rank + 2) % 4]))


def attended(folder: Path, session: Session) -> Any:
    heavy = LoCo(bits=2, block_size=32, exempt=())
    driver = adapt(session.sync, Accordion(light=LOCO, heavy=heavy, interval=2, unit="steps"))
    monitor(session.sync, None, every_n_steps=2, record=folder)
    return driver


def resumed(folder: Path, layout: str) -> Facts:
    """A controller, a monitor and a checkpoint; then a run from it."""
    run = Run(layout)
    session = run.compress()
    driver, path = attended(folder, session), folder / "checkpoint"
    run.train(4, batches=2)
    with session.save(path) as stamp:
        model_state, optimizer_state = get_state_dict(run.model, run.optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    everyone = [stamp]
    dist.broadcast_object_list(everyone)
    straight = run.train(3, 4, batches=2)
    weights, levels = run.weights(), dict(driver.levels)
    session.close()

    again = Run(layout)
    session = again.compress()
    attended(folder, session)
    model_state, optimizer_state = get_state_dict(again.model, again.optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(again.model, again.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    session.load(path, everyone[0])
    session.resume()
    back = again.train(3, 4, batches=2)
    session.close()
    return {"losses": (straight, back), "apart": apart(weights, again.weights()), "levels": levels}


@scenarios(resumed, world_size=4, layout=("module", "parameter", "hsdp", "whole"), slow=all_but(layout="parameter"))
def test_resumed(facts: list[Facts]) -> None:
    for rank in facts:
        straight, back = rank["losses"]
        assert straight == back
        assert rank["apart"] == 0.0
        assert rank["levels"] == facts[0]["levels"] != {}


def before_and_after(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    """Of six ranks: saved; of four: loaded. What this rank has not sent."""
    run = Run("parameter")
    session = run.compress(TopK(density=0.1, exempt=()), on_world_size_change="fold")
    path = folder / "checkpoint"
    if world_size == 6:
        run.train(3)
        with session.save(path) as stamp:
            path.mkdir(exist_ok=True)
        if rank == 0:
            torch.save(stamp, folder / "stamp.pt")
    else:
        stamps = [torch.load(folder / "stamp.pt") if rank == 0 else None]
        dist.broadcast_object_list(stamps)
        session.load(path, stamps[0])
    state = session.sync.state
    found = {name: (state.store(name).export_unsent(name), state.carryover.get(name)) for name in session.sync.specs}
    session.close()
    sums = {name: sum_of_known(*each) for name, each in found.items()}
    return {name: each.clone() for name, each in sums.items() if each is not None}


@pytest.mark.slow
def test_folded_into_fewer_ranks(tmp_path: Path) -> None:
    """Residuals of experts come from the ranks that had these experts, all others from all ranks."""
    saved, loaded = (run_ranks(before_and_after, size, tmp_path, timeout=200) for size in (6, 4))
    assert any("experts" in name for name in saved[0])
    for rank, each in enumerate(loaded):
        assert each.keys() == saved[0].keys()
        for name, values in each.items():
            old = [one[name] for one in (saved[rank % 2 :: 2] if "experts" in name else saved)]
            torch.testing.assert_close(values, sum(old) / len(old))


def with_and_without(folder: Path) -> Facts:
    """A monitor, validation and checkpoints change nothing."""
    found = []
    for attends in (False, True):
        run = Run("module")
        session = run.compress(TopK(density=0.1, exempt=()))
        if attends:
            monitor(session.sync, None, every_n_steps=2, record=folder)
        for step in range(4):
            run.train(1, step)
            if attends:
                run.model.eval()
                with torch.no_grad(), session.shared_weights():
                    run.model(torch.ones(2, 3, WIDTH))
                run.model.train()
                with session.save(folder / "checkpoint"):
                    (folder / "checkpoint").mkdir(exist_ok=True)
        found.append(run.weights())
        session.close()
    return {"apart": apart(*found), "record": len((folder / "lowbit.jsonl").read_text().splitlines())}


@scenarios(with_and_without, world_size=4)
def test_with_is_without(facts: list[Facts]) -> None:
    assert all(rank["apart"] == 0.0 for rank in facts)
    assert facts[0]["record"] > 2


def tokens(folder: Path) -> Facts:
    """Tokens that travel as codes of 8 bits."""
    losses = {}
    for codec in (None, 8):
        run = Run("module", codec)
        session = run.compress()
        losses[codec] = run.train(6)
        session.close()
    return losses


@pytest.mark.slow
@scenarios(tokens, world_size=4)
def test_coded_tokens(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank[8] != rank[None]
        assert rank[8] == pytest.approx(rank[None], rel=0.03)


def data_parallel(folder: Path) -> Facts:
    """DDP that ignores the experts, which each rank has alone."""
    weights = {}
    for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO}.items():
        model = net()
        mesh = init_device_mesh("cpu", (2,))
        for part in model:
            if isinstance(part, MixtureOfExperts):
                distribute(part, mesh)
                part.experts.up, part.experts.down = (
                    nn.Parameter(local(p.detach())) for p in part.experts.parameters()
                )
        ignored = [name for name, _ in model.named_parameters() if "experts" in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        session = None if compressor is None else compress(wrapped, optimizer, compressor)
        for step in range(4):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            (wrapped(x) - x.roll(1, -1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[way] = [copy.deepcopy(param.detach()) for param in model.parameters()]
        if session is not None:
            names = set(session.sync.specs)
            session.close()
    return {"apart": apart(weights["stock"], weights["dense"]), "names": names}


@scenarios(data_parallel, world_size=2)
def test_data_parallel(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["apart"] == 0.0
        assert not any("experts" in name for name in rank["names"])


def around(folder: Path) -> Facts:
    """Two levels where there are nodes; an overflow on one rank; experts that are unfrozen; a limit on memory."""
    facts: dict[str, Any] = {}
    losses = facts["losses"] = {}
    with nodes_of(2):
        for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO}.items():
            run = Run("module")
            session = None if compressor is None else run.compress(compressor)
            losses[way] = run.train(4)
            if session is not None:
                facts["nodes"] = [ranks.topology.node_size for ranks in session.sync.all_ranks]
                session.close()

    run, scaler = Run("module"), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    session = run.compress(scaler=scaler, memory=0.01)
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (run.model(x) - x.roll(1, -1)).square().mean()
        scaler.scale(loss * (float("inf") if step == 1 and dist.get_rank() == 3 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        session.end_step(run.optimizer, scaler)
        run.optimizer.zero_grad()
    facts["steps"] = session.sync.step_index, session.sync.num_skipped
    session.close()

    run = Run("module")
    frozen = [part for part in run.model.modules() if isinstance(part, Experts)]
    for part in frozen:
        part.requires_grad_(False)
    session = run.compress()
    run.train(2)
    before = session.sync.all_ranks[1].peers.sent_nbytes
    for part in frozen:
        part.requires_grad_(True)
    run.train(2, 2)
    facts["unfrozen"] = session.sync.all_ranks[1].peers.sent_nbytes - before, 2 * plans_of(session.sync)[1].sent_nbytes
    session.close()
    return facts


@pytest.mark.slow
@scenarios(around, world_size=4)
def test_with_everything_else(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"]["dense"] == pytest.approx(rank["losses"]["stock"], rel=2e-6)
        assert rank["losses"]["loco"] == pytest.approx(rank["losses"]["stock"], rel=0.03)
        assert rank["nodes"] == [2, None]
        assert rank["steps"] == (3, 1)
        sent, planned = rank["unfrozen"]
        assert 0 < planned <= sent


class Stack(nn.Module):
    """Experts that all take every token, whose results are added up; ranks may have different numbers of them."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, WIDTH, WIDTH) * WIDTH**-0.5)

    def distribute(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        everyones = all_gather_tensor_autograd(x, 0, self.group)
        total = sum(torch.relu(everyones @ each) for each in local(self.weight))
        out: Tensor = reduce_scatter_tensor_autograd(total, "sum", 0, self.group)
        return out


def uneven(folder: Path) -> Facts:
    """Three experts on two ranks: two and one, sharded over two other ranks each."""
    found = {}
    for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO}.items():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        torch.manual_seed(0)
        stack = Stack(3)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), stack)
        stack.distribute(mesh["ep"])
        fully_shard(stack, mesh=mesh["efsdp"])
        fully_shard(model, mesh=mesh["efsdp", "ep"]._flatten("dp"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        exact = {"weights": "exact"} if way == "dense" else {}
        session = None if compressor is None else compress(model, optimizer, compressor, **exact)
        losses = []
        for step in range(5):
            x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = (model(x) - x.roll(1, -1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[way] = losses
        if session is not None:
            found["rows"] = session.sync.specs["1.weight"].whole.shape[0]
            session.close()
    return found


@pytest.mark.slow
@scenarios(uneven, world_size=4)
def test_uneven(facts: list[Facts]) -> None:
    for place, rank in enumerate(facts):
        assert rank["rows"] == 2 - place % 2
        assert rank["dense"] == pytest.approx(rank["stock"], rel=2e-6)
        assert rank["loco"] == pytest.approx(rank["stock"], rel=0.02)


def by_hand() -> tuple[list[float], list[Tensor]]:
    """Two replicas whose weights are averaged after every third step, without this package."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "efsdp", "ep"))
    run, replica = Run.__new__(Run), mesh["efsdp", "ep"]._flatten("shard")
    run.model = net()
    for part in run.model:
        if isinstance(part, MixtureOfExperts):
            distribute(part, mesh["ep"])
            fully_shard(part.experts, mesh=mesh["efsdp"])
        fully_shard(part, mesh=replica)
    fully_shard(run.model, mesh=replica)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for start in (0, 3, 6):
        losses += run.train(3, start)
        for param in run.model.parameters():
            dist.all_reduce(mean := local(param).detach() / 2, group=mesh["replicate"].get_group())
            local(param).data.copy_(mean)
    return losses, run.weights()


def local_steps(folder: Path, fragments: int) -> Facts:
    """Replicas of whole mixtures of experts; LoCo from a checkpoint in the middle of a round."""
    facts: dict[str, Any] = {"stock": by_hand()}
    saved, stamps = list[Tensor](), list[Any]()
    for way, compressor in {"dense": Dense(), "loco": LOCO, "again": LOCO}.items():
        run = Run("hsdp")
        outer = LocalSGD(every=3) if way == "dense" else DiLoCo(every=3, fragments=fragments)
        session = run.compress(compressor, outer=outer)
        if way == "again":
            for param, value in zip(run.model.parameters(), saved, strict=True):
                local(param).data.copy_(value)
            session.load(folder / "checkpoint", stamps[0])
            session.resume()
        before = session.sync.sent_nbytes
        losses = [] if way == "again" else run.train(5)
        if way == "loco":
            with session.save(folder / "checkpoint") as stamp, session.shared_weights(validates=False):
                saved = run.weights()
            stamps = [stamp]
            dist.broadcast_object_list(stamps)
        losses += run.train(4, 5)
        rounds = [
            sum(message.total_nbytes for each in plan.rounds for message in each.messages)
            for plan in plans_of(session.sync)
        ]
        facts[way] = losses, run.weights()
        facts[f"{way} bytes"] = session.sync.sent_nbytes - before, 3 * sum(rounds)
        session.finish()
        facts[f"{way} ended"] = run.weights()
        session.close()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, facts["loco ended"])
    return facts | {"everyone": everyone}


@scenarios(local_steps, world_size=4, fragments=(1, 2), slow=all_but(fragments=2))
def test_local_steps(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert rank["dense"][0] == pytest.approx(rank["stock"][0], rel=1e-6)
        assert apart(rank["dense"][1], rank["stock"][1]) < 1e-5
        assert rank["again"][0] == rank["loco"][0][5:]
        assert apart(rank["again"][1], rank["loco"][1]) == 0.0
        assert apart(rank["loco ended"], rank["everyone"][number ^ 2]) == 0.0
        for way in ("dense", "loco"):
            sent, planned = rank[f"{way} bytes"]
            assert planned <= sent <= planned + 4096


def refused(folder: Path) -> Facts:
    """What serves one mesh, and meshes that do not go together."""
    facts: dict[str, Any] = {
        "whole model": raised(lambda: Run("hsdp").compress(ExDyna(exempt=()), outer=DiLoCo(every=2)))
    }
    whole = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "one"))
    mesh, model = whole["replicate", "shard"], net()
    distribute(model[1], whole["replicate"])
    fully_shard(model[1].experts, mesh=whole["shard", "one"])
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    facts["outer"] = raised(lambda: compress(model, optimizer, outer=DiLoCo(every=2)))
    model = net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[1], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh)
    facts["whole"] = raised(lambda: compress(model, torch.optim.AdamW(model.parameters())))
    model = net()
    whole = init_device_mesh("cpu", (4,))
    left = {param for part in model.modules() if isinstance(part, Experts) for param in part.parameters()}
    fully_shard(model, mesh=whole, ignored_params=left)
    facts["left out"] = raised(lambda: compress(model, torch.optim.AdamW(model.parameters())))
    return facts


@scenarios(refused, world_size=4)
def test_refused(facts: list[Facts]) -> None:
    for rank in facts:
        assert "outer= needs replicas that train separately, but the ranks" in rank["outer"]
        assert "experts on another mesh are sent in parts" in rank["whole model"]
        assert "and its parameters are whole" in rank["whole"]
        assert "nothing synchronizes 1.experts.up" in rank["left out"]


def second_moments(folder: Path, layout: str) -> Facts:
    """Adam's, after steps that move nothing: how far one bit's are from those of exact gradients."""
    found, exact = {}, list[Tensor]()
    for way in ("stock", "corrected", "as it is"):
        run = Run(layout)
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        session = None
        if way != "stock":
            session = run.compress(as_compressor("loco1"), second_moment=way == "corrected")
        run.train(24)
        own = [run.optimizer.state[param]["exp_avg_sq"] for param in run.model.parameters()]
        values = [local(each).detach().clone() for each in own]
        exact = exact or values
        found[way] = [float((a.sum() / b.sum()).log().abs()) for a, b in zip(values, exact, strict=True) if b.numel()]
        if session is not None:
            found["kept"] = [memory_of(plan).extra for plan in plans_of(session.sync)]
            session.close()
    return found | {"experts": [i for i, (name, _) in enumerate(run.model.named_parameters()) if "experts" in name]}


@scenarios(second_moments, world_size=4, layout=("module", "hsdp"), slow=all_but(layout="module"))
def test_second_moments(facts: list[Facts]) -> None:
    for rank in facts:
        for at in rank["experts"]:
            assert rank["corrected"][at] < 0.5 * rank["as it is"][at]


def chosen(folder: Path) -> Facts:
    """`Auto` tries set-ups and decides; experts are trained like stock's."""
    stock, run = Run("module"), Run("module")
    losses = stock.train(30)
    session = run.compress(Auto())
    found = run.train(30)
    assert session.pace is not None
    facts = {"losses": (losses, found), "tried": session.pace.reason}
    session.close()
    return facts


@scenarios(chosen, world_size=4)
def test_chosen(facts: list[Facts]) -> None:
    for rank in facts:
        stock, found = rank["losses"]
        assert rank["tried"] == facts[0]["tried"] != ""
        assert sum(found[-5:]) < 1.1 * sum(stock[-5:])


class Lit(L.LightningModule):
    """Makes its meshes, and shards itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.losses = net(), list[float]()

    def configure_model(self) -> None:
        wrap(self.net, "parameter")

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[0].roll(1, -1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)


def frameworks(folder: Path) -> Facts:
    losses = {}
    batches = TensorDataset(torch.randn(32, 5, WIDTH, generator=torch.Generator().manual_seed(1)))
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    stock = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    for name, strategy in {
        "stock": stock,
        "dense": LowBitFSDPStrategy("dense", weights="exact"),
        "loco": LowBitFSDPStrategy(LOCO),
    }.items():
        model = Lit()
        trainer = L.Trainer(
            accelerator="cpu", devices=4, strategy=strategy, max_steps=4, enable_model_summary=False, **quiet
        )
        trainer.fit(model, DataLoader(batches, batch_size=2))
        losses[name] = model.losses

    def parallelize(model: Any, mesh: Any) -> Any:
        wrap(model, "module")
        return model

    fabric = L.Fabric(accelerator="cpu", devices=4, strategy=FabricFSDPStrategy(LOCO, parallelize_fn=parallelize))
    fabric.launch()
    model = fabric.setup_module(net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    losses["fabric"] = []
    for at in range(4):
        x = batches.tensors[0][8 * at + 2 * fabric.global_rank :][:2]
        loss = (model(x) - x.roll(1, -1)).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses["fabric"].append(loss.item())
    return losses


def accelerate(folder: Path) -> Facts:
    """A model that is sharded passes through `prepare`."""
    losses = {"stock": Run("module").train(4)}
    sharding = fsdp_plugin(by_block=False)
    accelerator = make("fsdp", LowBitPlugin(Dense(), weights="exact"), fsdp_plugin=sharding)
    run = Run("module")
    run.model, run.optimizer = accelerator.prepare(run.model, run.optimizer)
    losses["dense"] = []
    for step in range(4):
        x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
        loss = (run.model(x) - x.roll(1, -1)).square().mean()
        accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses["dense"].append(loss.item())
    binding = binding_of(accelerator)
    assert binding is not None
    assert binding.sync is not None
    return losses | {"sizes": [ranks.world_size for ranks in binding.sync.all_ranks]}


@pytest.mark.slow
@scenarios(accelerate, world_size=4)
def test_accelerate(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["dense"] == pytest.approx(rank["stock"], rel=1e-5)
        assert rank["sizes"] == [4, 2]


@pytest.mark.slow
@scenarios(frameworks, world_size=4)
def test_frameworks(facts: list[Facts]) -> None:
    for losses in facts:
        assert losses["dense"] == pytest.approx(losses["stock"], rel=1e-5)
        assert losses["loco"] == pytest.approx(losses["stock"], rel=0.05)
        assert len(losses["fabric"]) == 4
        assert losses["fabric"][-1] < 1.2 * losses["stock"][0]
