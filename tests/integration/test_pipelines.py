"""Stages of a pipeline, each over its own data-parallel ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Dense
from lowbit_strategy.custom_loop import compress
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.meshes import LOCO, WIDTH, Block, Run, equal, place_in

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
