"""Tensor or context parallelism with data parallelism, together with everything else that a run may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import (
    AdaComm,
    Auto,
    Dense,
    DiLoCo,
    DivergenceError,
    Exact,
    LocalSGD,
    LoCo,
    WeightCode,
    WeightDelta,
)
from lowbit_strategy.control import Accordion
from lowbit_strategy.custom_loop import adapt, compress, monitor
from lowbit_strategy.plan.running import plan_of
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.meshes import LOCO, WIDTH, Run, equal, local, net, place_in, wrapped

TENSOR_PARALLEL = ("fsdp", "hsdp", "ddp")
LAYOUTS = (*TENSOR_PARALLEL, "cp")


def exact(layout: str) -> dict[str, Any]:
    return {} if layout == "ddp" else {"weights": Exact()}


def accumulated_and_clipped(folder: Path, layout: str) -> Facts:
    """Stock, dense, LoCo; the norm is that of all parts of the model."""
    found: dict[str, Any] = {"tolerance": 1e-6 if layout == "cp" else 0.0}  # gloo adds up four ranks in another order
    norms: list[float] = []
    for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO}.items():
        run = wrapped(layout, norms=True)
        options = exact(layout) if way == "dense" else {}
        session = None if compressor is None else compress(run.model, run.optimizer, compressor, **options)
        norms.clear()

        def clip(params: list[Tensor] = run.params()) -> None:  # noqa: B008 (of this run)
            norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))

        losses = run.train(session, 3, batches=2, before_step=clip)
        found[way] = (losses, list(norms), run.weights())
        if session is not None:
            session.close()
    return found


@scenarios(accumulated_and_clipped, world_size=4, layout=LAYOUTS, slow=all_but(layout="fsdp"))
def test_accumulated_and_clipped(facts: list[Facts]) -> None:
    for rank in facts:
        tolerance = rank["tolerance"]
        for stock, dense in zip(rank["stock"][:2], rank["dense"][:2], strict=True):
            assert dense == pytest.approx(stock, rel=tolerance, abs=0.0)
        for stock, dense in zip(rank["stock"][2], rank["dense"][2], strict=True):
            torch.testing.assert_close(dense, stock, rtol=tolerance, atol=10 * tolerance)
        assert rank["loco"][0] == pytest.approx(rank["stock"][0], rel=0.02)
        assert rank["loco"][1] == pytest.approx(rank["stock"][1], rel=0.1)


def watched(folder: Path, layout: str) -> Facts:
    """Validation and a monitor change nothing, however weights travel."""
    same = {}
    for weights in (None,) if layout == "ddp" else (None, WeightCode(keep="replica"), WeightDelta()):
        ends = []
        for watches in (False, True):
            run = wrapped(layout)
            session = compress(run.model, run.optimizer, LOCO, weights=weights)
            seen: list[int] = []
            if watches:
                monitor(session.sync, lambda metrics, step, seen=seen: seen.append(step), every_n_steps=2)
            losses = run.train(session, 5, after_step=run.validate if watches else lambda: None)
            ends.append((losses, run.weights()))
            session.close()
        same[repr(weights)] = ends[0][0] == ends[1][0] and equal(ends[0][1], ends[1][1]) and seen == [0, 2, 4]
    return same


@scenarios(watched, world_size=4, layout=LAYOUTS, slow=all_but(layout="hsdp"))
def test_watched(facts: list[Facts]) -> None:
    for rank in facts:
        assert all(rank.values()), rank


def decided(folder: Path, layout: str) -> Facts:
    """Parts of uneven size, of which one side's are too small to be compressed: all ranks make one decision."""
    hidden = 65  # 33 and 32
    loco = LoCo(block_size=32, exempt=("@vector", lambda spec: spec.numel <= 32 * WIDTH))
    run = wrapped(layout, hidden=hidden)
    session = compress(run.model, run.optimizer, loco)
    heavy = LoCo(bits=2, block_size=32, exempt=loco.exempt)
    control = adapt(session.sync, Accordion(light=loco, heavy=heavy, interval=2, unit="steps", eta=10.0))
    run.train(session, 6)
    state, kinds = control.state, {name: each.kind for name, each in session.sync.state.assignments.items()}
    session.close()
    return {"state": state, "kinds": kinds}


@scenarios(decided, world_size=4, layout=TENSOR_PARALLEL, slow=all_but(layout="fsdp"))
def test_decided(facts: list[Facts]) -> None:
    assert facts[0]["state"]["levels"]["0.up.weight"] == 1  # it has switched
    for rank in facts:
        assert rank["state"] == facts[0]["state"]
    assert facts[0]["kinds"] != facts[1]["kinds"]


def chosen(folder: Path, layout: str) -> Facts:
    """`Auto` switches from the framework's steps to others and back."""
    run = wrapped(layout)
    session = compress(run.model, run.optimizer, Auto())
    losses = run.train(session, 30)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (place_in(run.mesh), session.sync.ranks.column, run.weights()))
    choice = session.pace.phase, session.pace.active and session.pace.active.name
    session.close()
    return {"losses": losses, "choice": choice, "everyone": everyone}


@scenarios(chosen, world_size=4, layout=LAYOUTS, slow=all_but(layout="ddp"))
def test_chosen(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["choice"] == facts[0]["choice"]
        assert rank["losses"][-1] < 0.6 * rank["losses"][0]
    for place, column, weights in facts[0]["everyone"]:
        if len(weights[2]) and place:  # ranks with the same part
            first = next(each for at, of, each in facts[0]["everyone"] if (at, of) == (0, column))
            assert [x.shape for x in weights] == [x.shape for x in first]


def replicas_of_one_dim(folder: Path) -> Facts:
    """`shard_size` asks for replicas that the mesh of the modules does not show: the framework's own steps, which
    `Auto` times first, reduce over them as well.
    """
    weights = {}
    for dims in (1, 2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = net()
        for part in (*model, model):
            fully_shard(part, mesh=mesh["shard"] if dims == 1 else mesh)
        run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), mesh)
        session = compress(model, run.optimizer, Auto(), **({"shard_size": 2} if dims == 1 else {}))
        run.train(session, 4)
        weights[dims] = run.weights()
        session.close()
    return {"same": equal(weights[1], weights[2])}


@scenarios(replicas_of_one_dim, world_size=4)
def test_replicas_of_one_dim(facts: list[Facts]) -> None:
    assert all(rank["same"] for rank in facts)


def diverging(folder: Path, layout: str) -> Facts:
    """One rank's part changes: those that should have the same one are told, and nobody else."""
    run = wrapped(layout)
    session = compress(run.model, run.optimizer, LOCO)
    run.train(session, 1)
    if dist.get_rank() == 2:
        with torch.no_grad():
            local(run.params()[2]).add_(1e-3)
    found = raised(lambda: run.train(session, 1, start=1))
    dist.barrier()
    session.close()
    other = wrapped(layout)
    different = LoCo(block_size=32 if dist.get_rank() % 2 else 64)  # the same on ranks of one part
    return {"divergence": found, "options": raised(lambda: compress(other.model, other.optimizer, different))}


@scenarios(diverging, world_size=4, layout=("hsdp", "ddp"), slow=all_but(layout="hsdp"))
def test_diverging(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert (DivergenceError.__name__ in rank["divergence"]) == (number in (0, 2))
        assert "rank 1 differs from rank 0 in compressor.block_size" in rank["options"]


def plain_replicas(layout: str, shards: int = 1) -> Run:
    """The same two replicas without tensor parallelism."""
    if layout == "hsdp":
        shape = (2, shards, 2 // shards)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "both"))["replicate", "shard"]
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "both"))["replicate"]
    model = outer = net()
    if layout == "ddp":
        outer = DistributedDataParallel(model, process_group=mesh.get_group())
    for part in (*model, model) if layout == "hsdp" else ():
        fully_shard(part, mesh=mesh)
    return Run(outer, torch.optim.AdamW(outer.parameters(), lr=1e-2), mesh)


def local_steps(folder: Path, layout: str, rule: str) -> Facts:
    """The dims of tensor parallelism are inside of a replica; validation sees the anchors and changes nothing."""
    outer: Any = {"localsgd": LocalSGD(every=3), "diloco": DiLoCo(every=3)}[rule]
    losses, weights = {}, {}
    for way in ("plain", "parallel", "validated"):
        run = plain_replicas(layout) if way == "plain" else wrapped(layout)
        session = compress(run.model, run.optimizer, Dense(), outer=outer)

        def validate(session: Any = session, run: Run = run) -> None:
            with session.shared_weights():
                run.validate()

        losses[way] = run.train(session, 8, after_step=validate if way == "validated" else lambda: None)
        session.finish()
        weights[way] = run.weights()
        session.close()
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, weights["parallel"])
    return {"losses": losses, "same": equal(weights["parallel"], weights["validated"]), "everyone": everyone}


@scenarios(
    local_steps,
    world_size=4,
    layout=("hsdp", "ddp"),
    rule=("localsgd", "diloco"),
    slow=lambda layout, rule, world_size: (layout, rule) != ("hsdp", "diloco"),
)
def test_local_steps(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert rank["losses"]["parallel"] == pytest.approx(rank["losses"]["plain"], rel=1e-5)
        assert rank["losses"]["validated"] == rank["losses"]["parallel"]
        assert rank["same"]
        assert equal(rank["everyone"][number], rank["everyone"][number ^ 2])


def rounds_of_a_replica(folder: Path, layout: str) -> Facts:
    """Weights that are not finite on one tensor-parallel rank; losses that differ between the ranks of a replica."""
    run = wrapped(layout)
    session = compress(run.model, run.optimizer, Dense(), outer=LocalSGD(every=3))

    def spoil() -> None:
        if dist.get_rank() == 2:
            local(run.params()[2]).data[0] = torch.nan

    run.train(session, 2)
    run.train(session, 1, start=2, before_step=spoil)
    spoiled: list[Any] = [None] * 4
    dist.all_gather_object(spoiled, (run.weights(), len(run.optimizer.state)))
    session.close()

    run = plain_replicas(layout, shards=2) if layout == "hsdp" else wrapped(layout)
    session = compress(run.model, run.optimizer, Dense(), outer=LocalSGD(every=AdaComm(start=8, minimum=2)))
    steps = list[int]()

    def lose() -> None:
        loss = 0.7 ** (session.sync.step_index * (dist.get_rank() % 2))
        session.pace.begin_backward(torch.tensor(loss))
        steps.append(session.pace.outer.round_length)

    run.train(session, 30, before_step=lose)
    session.close()
    return {"spoiled": spoiled, "lengths": steps}


@scenarios(rounds_of_a_replica, world_size=4, layout=("hsdp", "ddp"), slow=all_but(layout="hsdp"))
def test_rounds_of_a_replica(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert rank["lengths"] == facts[0]["lengths"]
        assert len(set(rank["lengths"])) > 1
        weights, moments = rank["spoiled"][number]
        assert all(each.isfinite().all() for each in weights)
        assert equal(weights, rank["spoiled"][number ^ 2][0])
        assert torch.equal(weights[0], rank["spoiled"][number ^ 1][0][0])  # a norm, which all ranks have
        assert (moments == 0) == (number > 1)


def two_levels(folder: Path, layout: str) -> Facts:
    """Two nodes of four ranks, two of which have one part of the model."""
    losses, ranks = {}, None
    everyone: list[Any] = [None] * 8
    with nodes_of(4):
        for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO, "coded": LOCO}.items():
            run = wrapped(layout)
            options: dict[str, Any] = exact(layout) if way != "coded" else {}
            session = None
            if compressor is not None:
                session = compress(run.model, run.optimizer, compressor, two_level=True, **options)
                before = session.sync.ranks.peers.sent_nbytes
            losses[way] = run.train(session, 4)
            if session is not None:
                ranks, plan = session.sync.ranks, plan_of(session.sync)
                between = [m.total_nbytes for each in plan.gradients for m in each.messages if m.level == "inter-node"]
                bytes_ = (ranks.peers.sent_nbytes - before, 4 * sum(between))
                session.close()
        dist.all_gather_object(everyone, (place_in(run.mesh), run.weights()))
    assert ranks is not None
    sizes = ranks.peers.world_size, ranks.world_size, ranks.everyone.world_size
    return {"losses": losses, "sizes": sizes, "bytes": bytes_, "everyone": everyone}


@pytest.mark.slow
@scenarios(two_levels, world_size=8, layout=("fsdp", "ddp"))
def test_two_levels(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert rank["sizes"] == (2, 4, 8)
        assert rank["losses"]["dense"] == pytest.approx(rank["losses"]["stock"], rel=1e-5)
        for way in ("loco", "coded"):
            assert rank["losses"][way] == pytest.approx(rank["losses"]["stock"], rel=0.03)
        counted, planned = rank["bytes"]
        assert counted == planned
        _, own = rank["everyone"][number]
        if len(own[2]) == len(rank["everyone"][number % 2][1][2]) == 64 // 2:  # under DDP all have the whole part
            assert equal(own, rank["everyone"][number % 2][1])


class Copied(torch.autograd.Function):
    """The same on all tensor-parallel ranks; gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Added(torch.autograd.Function):
    """The reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


class Part(nn.Module):
    """A block's network cut by hand: its parameters are this rank's, and do not show that there are others."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(mesh.get_local_rank())
        self.group = mesh.get_group()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + Added.apply(self.down(torch.relu(self.up(Copied.apply(x, self.group)))), self.group)
        return out


def by_hand(folder: Path, layout: str) -> Facts:
    """Stock, dense, and LoCo from a checkpoint."""
    found: dict[str, Any] = {}
    saved, stamp = list[Tensor](), dict[str, Any]()
    for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO, "again": LOCO}.items():
        shape, names = ((2, 1, 2), ("dp", "shard", "tp")) if layout == "hsdp" else ((2, 2), ("dp", "tp"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        dims = mesh["dp", "shard"] if layout == "hsdp" else mesh["dp"]
        model = outer = nn.Sequential(Part(mesh["tp"]), Part(mesh["tp"]))
        if layout == "ddp":
            outer = DistributedDataParallel(model, process_group=dims.get_group())
        for part in () if layout == "ddp" else (*model, model):
            fully_shard(part, mesh=dims)
        run, session = Run(outer, torch.optim.SGD(outer.parameters(), lr=0.1), dims), None
        if compressor is not None:
            options = exact(layout) if way == "dense" else {}
            session = compress(run.model, run.optimizer, compressor, mesh=mesh, **options)
        if way == "again":
            assert session is not None
            for param, value in zip(run.params(), saved, strict=True):
                local(param).data.copy_(value)
            session.load(folder / "checkpoint", stamp)
            session.resume()
        losses = run.train(session, 2, start=2 if way == "again" else 0)
        if way == "loco":
            assert session is not None
            with session.save(folder / "checkpoint") as mine:
                saved = run.weights()
            stamps = [mine]
            dist.broadcast_object_list(stamps)
            stamp = stamps[0]
        if way != "again":
            losses += run.train(session, 2, start=2)
        found[way] = losses, run.weights()
        if session is not None:
            ranks = session.sync.ranks
            found["ranks"] = ranks.world_size, ranks.everyone.world_size, ranks.column
            session.close()
    return found


@scenarios(by_hand, world_size=4, layout=TENSOR_PARALLEL, slow=all_but(layout="hsdp"))
def test_by_hand(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        assert rank["dense"][0] == rank["stock"][0]
        assert equal(rank["dense"][1], rank["stock"][1])
        assert rank["ranks"] == (2, 4, number % 2)
        assert rank["again"][0] == rank["loco"][0][2:]
        assert equal(rank["again"][1], rank["loco"][1])
