"""Stages of a pipeline, each over its own data-parallel ranks."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lowbit_strategy import Dense, DiLoCo, LoCo, TopK
from lowbit_strategy.control import Accordion
from lowbit_strategy.custom_loop import Session, adapt, compress, monitor
from lowbit_strategy.plan.running import plan_of
from testing.processes.node_size import nodes_of
from testing.processes.ranks import run_ranks
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.meshes import LOCO, WIDTH, Block, Run, equal, place_in, unsent

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def stage(at: int, mesh: DeviceMesh, wrapper: str) -> nn.Module:
    torch.manual_seed(at)
    if wrapper == "ddp":  # without find_unused_parameters torch's pipelines fail in the second step
        return DistributedDataParallel(Block(), process_group=mesh.get_group(), find_unused_parameters=True)
    return fully_shard(Block(), mesh=mesh)


def pipeline(schedule: str, parts: list[nn.Module], places: tuple[int, ...], mesh: DeviceMesh) -> Any:
    """The stages, and their schedule."""
    group, num_stages = mesh["pp"].get_group(), 2 * len(places)
    made = [
        PipelineStage(part, at, num_stages, torch.device("cpu"), group=group)
        for part, at in zip(parts, places, strict=True)
    ]
    kind: Any = SCHEDULES[schedule]
    return made, kind(made if len(made) > 1 else made[0], n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)


def stages(folder: Path, schedule: str, wrapper: str) -> Facts:
    """Stages of a pipeline with two data-parallel ranks each; interleaved: two stages on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    first, dims = mesh["pp"].get_local_rank(), mesh["dp"]
    places = (first, first + 2) if schedule == "interleaved" else (first,)
    losses: dict[str, list[float]] = {}
    weights: dict[str, list[Tensor]] = {}
    for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO}.items():
        parts, sessions, optimizers = [], [], []
        for at in places:
            parts.append(stage(at, dims, wrapper))
            optimizers.append(torch.optim.AdamW(parts[-1].parameters(), lr=1e-2))
            if compressor is not None:
                sessions.append(compress(parts[-1], optimizers[-1], compressor))
        made, run = pipeline(schedule, parts, places, mesh)
        losses[way] = []
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + dims.get_local_rank())
            x, found = torch.randn(8, WIDTH, generator=generator), list[Tensor]()
            last = {"target": x.roll(1, 1), "losses": found} if made[-1].is_last else {}
            run.step(*([x] if made[0].is_first else []), **last)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses[way] += [loss.item() for loss in found]
        weights[way] = [each for optimizer in optimizers for each in Run(parts[0], optimizer, dims).weights()]
        steps = [session.sync.step_index for session in sessions]
        for session in sessions:
            session.close()
    return {"losses": losses, "same": equal(weights["stock"], weights["dense"]), "steps": steps}


def thrown_away(folder: Path, layout: str) -> Facts:
    """A pipeline's gradients are cleared without a step: residuals are those of a run that never made them."""
    shape = (2, 2, 1) if layout == "fsdp" else (2, 1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "shard", "replicate"))
    at, dims = mesh["pp"].get_local_rank(), mesh["shard"] if layout == "fsdp" else mesh["replicate", "shard"]
    found = []
    for thrown in (None, 2):
        torch.manual_seed(at)
        part = Block()
        fully_shard(part.down, mesh=dims)
        fully_shard(part, mesh=dims)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
        session = compress(part, optimizer, LOCO)
        stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        run = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
        for step in (0, 1, 2, 3) if thrown else (0, 1, 3):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + place_in(dims)))
            run.step(*([x] if stage.is_first else []), **({"target": x.roll(1, 1)} if stage.is_last else {}))
            if step != thrown:
                optimizer.step()
            optimizer.zero_grad()
        residuals = [
            tensor.clone() for name in session.sync.specs for tensor in session.sync.state.tensors(name).values()
        ]
        found.append((Run(part, optimizer, dims).weights(), residuals))
        session.close()
    (weights, residuals), (weights_too, residuals_too) = found
    return {"any": bool(residuals), "same": equal(weights, weights_too) and equal(residuals, residuals_too)}


@scenarios(thrown_away, world_size=4, layout=("fsdp", "hsdp"), slow=all_but(layout="fsdp"))
def test_pipeline_thrown_away(facts: list[Facts]) -> None:
    assert all(rank["any"] and rank["same"] for rank in facts)


@scenarios(
    stages,
    world_size=4,
    schedule=tuple(SCHEDULES),
    wrapper=("fsdp", "ddp"),
    slow=lambda schedule, wrapper, **_: schedule != ("interleaved" if wrapper == "fsdp" else "1f1b"),
)
def test_pipeline_stages(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"]
        assert set(rank["steps"]) == {4}
        assert rank["losses"]["dense"] == rank["losses"]["stock"]
        assert rank["losses"]["loco"] == pytest.approx(rank["losses"]["stock"], rel=0.05)


def resumed(folder: Path, sessions: str) -> Facts:
    """Two stages on a rank and one optimizer: a session for each stage, or one for both."""
    wrapper, number = sessions.split()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    first, dims = mesh["pp"].get_local_rank(), mesh["dp"]
    found: dict[str, list[Tensor]] = {}
    saved: dict[str, Any] = {}
    path, stamps = folder / f"stages of {first}", list[Any]()
    for way in ("straight", "resumed"):
        parts = [stage(at, dims, wrapper) for at in (first, first + 2)]
        both = nn.ModuleList(parts)
        optimizer = torch.optim.AdamW(both.parameters(), lr=1e-2)
        attached = [compress(each, optimizer, LOCO) for each in ([both] if number == "one" else parts)]
        if way == "straight":
            train(mesh, parts, optimizer, 0)
            for at, session in enumerate(attached):
                with session.save(f"{path}-{at}") as stamp:
                    stamps.append(stamp)
            saved = copy.deepcopy({"parts": [each.state_dict() for each in parts], "optimizer": optimizer.state_dict()})
        else:
            for part, state in zip(parts, saved["parts"], strict=True):
                part.load_state_dict(state)
            optimizer.load_state_dict(saved["optimizer"])
            for at, session in enumerate(attached):
                session.load(f"{path}-{at}", stamps[at])
                session.resume()
        train(mesh, parts, optimizer, 3)
        found[way] = Run(both, optimizer, dims).weights()
        steps = [session.sync.step_index for session in attached]
        for session in attached:
            session.close()
    return {"same": equal(found["straight"], found["resumed"]), "steps": steps}


def train(mesh: DeviceMesh, parts: list[nn.Module], optimizer: torch.optim.Optimizer, start: int) -> None:
    first, dims = mesh["pp"].get_local_rank(), mesh["dp"]
    made, run = pipeline("interleaved", parts, (first, first + 2), mesh)
    for step in range(start, start + 3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dims.get_local_rank()))
        run.step(*([x] if made[0].is_first else []), **({"target": x.roll(1, 1)} if made[-1].is_last else {}))
        optimizer.step()
        optimizer.zero_grad()


@scenarios(resumed, world_size=4, sessions=("fsdp two", "fsdp one", "ddp two"), slow=all_but(sessions="fsdp two"))
def test_resumed_stages(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["same"]
        assert set(rank["steps"]) == {6}


def attended(folder: Path, layout: str) -> Facts:
    """Evaluations, a monitor and a checkpoint change nothing, with a controller and a norm over all stages; nor does
    going on from the checkpoint.
    """
    shape = (2, 2, 1) if layout == "fsdp" else (2, 1, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "shard", "replicate"))
    at, dims = mesh["pp"].get_local_rank(), mesh["shard"] if layout == "fsdp" else mesh["replicate", "shard"]
    path, stamps = folder / "checkpoint", list[Any]()
    heavy = LoCo(bits=2, block_size=32, exempt=())
    found: dict[str, Any] = {}
    for way in ("plain", "watched", "resumed"):
        torch.manual_seed(at)
        part: Any = nn.Sequential(Block(), Block())
        for block in (*part, part):
            fully_shard(block, mesh=dims)
        optimizer = torch.optim.AdamW(part.parameters(), lr=1e-2)
        session = compress(part, optimizer, LOCO, outer=DiLoCo(every=3) if layout == "rounds" else None)
        control = adapt(session.sync, Accordion(light=LOCO, heavy=heavy, interval=2, unit="steps"))
        if way == "watched":
            monitor(session.sync, None, every_n_steps=2, record=folder / str(at))
        if way == "resumed":
            model_state, optimizer_state = get_state_dict(part, optimizer)
            dcp.load({f"model {at}": model_state, f"optimizer {at}": optimizer_state}, checkpoint_id=path)
            set_state_dict(part, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
            session.load(f"{path}-{at}", stamps[2 * at])
            session.resume()
        stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
        run: Any = Schedule1F1B(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)

        def pass_through(call: Any, seed: int, stage: Any = stage) -> None:
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * seed + place_in(dims)))
            call(*([x] if stage.is_first else []), **({"target": x.roll(1, 1)} if stage.is_last else {}))

        for step in range(4 if way == "resumed" else 0, 8):
            pass_through(run.step, step)
            square = get_total_norm([each.grad for each in part.parameters()]).full_tensor().square()
            dist.all_reduce(square, group=mesh["pp"].get_group())
            clip_grads_with_norm_(part.parameters(), 0.1, square.sqrt())
            optimizer.step()
            optimizer.zero_grad()
            if way != "watched":
                continue
            with session.shared_weights():
                part.eval()
                pass_through(run.eval, 100)
                part.train()
            if step == 3:
                with session.save(f"{path}-{at}") as stamp, session.shared_weights(validates=False):
                    model_state, optimizer_state = get_state_dict(part, optimizer)
                    dcp.save({f"model {at}": model_state, f"optimizer {at}": optimizer_state}, checkpoint_id=path)
                stamps = [None] * 4
                dist.all_gather_object(stamps, stamp)
        found[way] = Run(part, optimizer, dims).weights(), dict(control.levels)
        session.close()
    return found


@scenarios(attended, world_size=4, layout=("fsdp", "hsdp", "rounds"), slow=lambda layout, world_size: layout == "hsdp")
def test_attended_stages(facts: list[Facts]) -> None:
    for rank in facts:
        for way in ("watched", "resumed"):
            assert equal(rank["plain"][0], rank[way][0])
            assert rank["plain"][1] == rank[way][1] != {}


def two_levels(folder: Path, wrapper: str) -> Facts:
    """Stages with four data-parallel ranks on two nodes: dense as stock, bytes between nodes as planned."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    first, dims = mesh["pp"].get_local_rank(), mesh["dp"]
    weights, counted = {}, None
    with nodes_of(2):
        for way, compressor in {"stock": None, "dense": Dense(), "loco": LOCO}.items():
            part = stage(first, dims, wrapper)
            optimizer = torch.optim.SGD(part.parameters(), lr=1e-2)
            session = None if compressor is None else compress(part, optimizer, compressor, two_level=True)
            sent = steps(mesh, part, optimizer, 4, session)
            weights[way] = Run(part, optimizer, dims).weights()
            if session is not None:
                messages = [message for each in plan_of(session.sync).gradients for message in each.messages]
                between = sum(message.total_nbytes for message in messages if message.level == "inter-node")
                counted = (sent, [between] * 3)
                session.close()
    away = {
        way: max(float((one - other).abs().max()) for one, other in zip(weights["stock"], weights[way], strict=True))
        for way in ("dense", "loco")
    }
    return {"away": away, "bytes": counted}


def steps(
    mesh: DeviceMesh, part: nn.Module, optimizer: torch.optim.Optimizer, number: int, session: Session | None
) -> list[int]:
    """What each step but the first has sent to peers. Before the first, torch infers shapes with a real pass, which
    makes stock DDP reduce the first micro-batch too, and FSDP2 call with no gradient at all.
    """
    made, run = pipeline("1f1b", [part], (mesh["pp"].get_local_rank(),), mesh)
    sent = []
    for step in range(number):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank()))
        run.step(*([x] if made[0].is_first else []), **({"target": x.roll(1, 1)} if made[-1].is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
        sent.append(0 if session is None else session.sync.ranks.peers.sent_nbytes)
    return [later - earlier for earlier, later in itertools.pairwise(sent)]


@pytest.mark.slow
@scenarios(two_levels, world_size=8, wrapper=("fsdp", "ddp"))
def test_stages_over_two_levels(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["away"]["dense"] < 1e-6 < rank["away"]["loco"] < 1e-2
        counted, planned = rank["bytes"]
        assert counted == planned
        assert min(planned) > 0


def before_and_after(rank: int, world_size: int, folder: Path, wrapper: str) -> tuple[int, dict[str, Tensor]]:
    """Of eight ranks: saved; of four: loaded. The stage, and what is unsent."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("pp", "dp"))
    at = mesh["pp"].get_local_rank()
    part = stage(at, mesh["dp"], wrapper)
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-2)
    session = compress(part, optimizer, TopK(density=0.1, exempt=()), on_world_size_change="fold")
    path = folder / f"stage {at}"
    if world_size == 8:
        steps(mesh, part, optimizer, 3, session)
        with session.save(path) as stamp:
            if mesh["dp"].get_local_rank() == 0:
                torch.save(stamp, folder / f"{at}.pt")
    else:
        session.load(path, torch.load(folder / f"{at}.pt"))
    found = at, unsent(session)
    session.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_stages_fold_into_fewer_data_parallel_ranks(tmp_path: Path, wrapper: str) -> None:
    """Each rank of a stage gets the mean of what the ranks of this stage had not sent."""
    saved, loaded = (run_ranks(before_and_after, size, tmp_path, wrapper, timeout=120) for size in (8, 4))
    for at, each in loaded:
        before = [values for stage, values in saved if stage == at]
        assert len(before) == 4
        assert each.keys() == before[0].keys() != set()
        for name, values in each.items():
            torch.testing.assert_close(values, sum(old[name] for old in before) / 4)
        assert any(values.any() for values in each.values())
