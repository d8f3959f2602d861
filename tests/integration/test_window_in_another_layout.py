"""A controller's window that a checkpoint cuts goes on in another layout and on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.control import Accordion, AdaQS, Controller
from lowbit_strategy.custom_loop import CHECKPOINT_KEY, adapt, compress
from testing.processes.node_size import nodes_of
from testing.processes.ranks import run_ranks

LEVELS = (LoCo(bits=8), LoCo(bits=4), LoCo(bits=2))
CONTROLLERS: dict[str, Any] = {
    "accordion": lambda gradient: Accordion(
        light=LEVELS[0], heavy=LEVELS[2], interval=4, unit="steps", gradient=gradient
    ),
    "adaqs": lambda gradient: AdaQS(ladder=LEVELS, interval=4, gradient=gradient, per="parameter"),
}


def figures(rank: int, world_size: int, layout: str, controller: Controller, path: Path, first: int) -> dict[str, Any]:
    """Of a window of four steps: saved after two if `first` is 0, or loaded and ended. Gradients are given and the same
    in all runs, whatever the layout: their mean is that of four fixed samples.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 20), nn.Tanh(), nn.Linear(20, 7))
    options: dict[str, Any] = {}
    if layout in ("ddp", "two levels"):
        model: Any = DistributedDataParallel(net)
    else:
        shape = (world_size,) if layout == "fsdp" else (world_size // 2, 2)
        names = ("shard",) if layout == "fsdp" else ("replicate", "shard")
        model = fully_shard(net, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        options = {} if layout == "fsdp" else {"shard_size": 2}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with nodes_of(2) if layout == "two levels" else nodes_of(world_size):
        session = compress(model, optimizer, LoCo(bits=8), **options)
    driver = adapt(session.sync, controller)
    window = session.sync.rank_state["window"]
    if first:
        session.load(path, torch.load(path, weights_only=True)[CHECKPOINT_KEY])
        session.resume()
    for step in range(first, 4):
        optimizer.zero_grad()
        samples = torch.randn(12, 24, generator=torch.Generator().manual_seed(step))
        model(samples.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        if step == 1:
            with session.save(path) as stamp:
                if rank == 0:
                    torch.save({CHECKPOINT_KEY: stamp}, path)
    shown = window.read()  # type: ignore[attr-defined]
    session.close()
    assert driver.state
    dist.barrier()
    return shown


WORLDS = {"ddp": 2, "fsdp": 3, "hsdp": 4, "two levels": 4}
PAIRS = [(saved, loaded) for saved in WORLDS for loaded in WORLDS if saved != loaded]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(*pair, marks=[] if pair in (("fsdp", "ddp"), ("two levels", "fsdp")) else pytest.mark.slow)
        for pair in PAIRS
    ],
)
@pytest.mark.parametrize("controller", ["accordion", pytest.param("adaqs", marks=pytest.mark.slow)])
def test_sums_of_means_are_the_same_in_every_layout(tmp_path: Path, saved: str, loaded: str, controller: str) -> None:
    made = CONTROLLERS[controller]("mean")
    path = tmp_path / "window.pt"
    whole = run_ranks(figures, WORLDS[saved], saved, made, path, 0)[0]
    found = run_ranks(figures, WORLDS[loaded], loaded, made, path, 2)
    assert all(each == found[0] for each in found)
    assert found[0]["accumulated_steps"] == 4
    for figure in ("accumulated_norm", "accumulated_square"):
        # exempt parameters are exact; of the others codes differ with the layout
        assert found[0][figure] == pytest.approx(whole[figure], rel=0.05)
        biases = {name: value for name, value in whole[figure].items() if name.endswith("bias")}
        assert {name: found[0][figure][name] for name in biases} == pytest.approx(biases, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_sums_of_each_ranks_own_gradients_go_on(tmp_path: Path, pair: tuple[str, str]) -> None:
    made, path = CONTROLLERS["adaqs"]("local"), tmp_path / "window.pt"
    run_ranks(figures, WORLDS[pair[0]], pair[0], made, path, 0)
    found = run_ranks(figures, WORLDS[pair[1]], pair[1], made, path, 2)
    assert all(each == found[0] for each in found)
    assert found[0]["accumulated_steps"] == 4
    assert all(value > 0 for value in found[0]["accumulated_norm"].values())
