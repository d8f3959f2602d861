"""Random sequences of what scripts do with a model, with weights kept between gathers and without: the same to the bit.

What is kept must never be seen after the weights have changed, whatever changed them. The reference keeps nothing, so
every gather sends what the owners have; differences need what is kept, so a run is compared with one that looks at its
model more often. Exact weights with `Dense` are FSDP2 without this package, but for the order of sums.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lowbit_strategy import Dense, Exact, LoCo, WeightCode, WeightDelta
from lowbit_strategy.custom_loop import SyncOptions, attach_fsdp, prepare
from testing.processes.node_size import nodes_of
from testing.processes.ranks import join_group, run_ranks
from testing.training.comparing import close
from testing.training.ddp_loop import CPU

WIDTH = 48
LENGTH = 12
ACTIONS = ("train",) * 4 + ("accumulate", "evaluate", "look", "edit", "save", "load", "freeze", "unfreeze", "mode")
KEEPS: dict[str, tuple[Any, ...]] = {
    "code": (WeightCode(keep="nothing"), WeightCode(), WeightCode(keep="replica")),
    "exact": ("exact", Exact(keep="replica")),
    "delta": (WeightDelta(),),
}


@functools.cache
def meshes(size: int) -> DeviceMesh:
    """Once per process: groups of gloo have threads that never end."""
    return init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("replicas", "shards"))


class Program:
    """One model, and the actions of one seed on it; all ranks take the same ones, with data of their own.

    Args:
        weights: None: FSDP2 without this package.
    """

    def __init__(self, weights: Any, compressor: Any, folder: Path, shard_size: int | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3)))
        options = SyncOptions(weights=weights, shard_size=shard_size)
        prepared = None if weights is None else prepare(self.model, compressor, options, scatter=True)
        mesh = meshes(shard_size or dist.get_world_size())
        if prepared is not None or shard_size is None:  # this package makes the second level itself
            mesh = mesh["shards"]
        for block in self.model[:2]:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.session = None if prepared is None else attach_fsdp(self.model, prepared, device=CPU)
        self.sharded = list(self.model.parameters())  # FSDP2 shows others where a module stays gathered
        self.optimizer = torch.optim.SGD(self.sharded, lr=0.05, momentum=0.9)
        self.generator = torch.Generator().manual_seed(dist.get_rank())
        self.looked = False  # a forward pass that no backward pass has followed
        self.folder, self.saved, self.seen = folder, None, list[float]()

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def forward(self) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.generator)
        loss: Tensor = (self.model(x) - x.roll(1, 1)).square().mean()
        self.seen.append(loss.item())
        return loss

    def shards(self) -> list[Tensor]:
        return [p.to_local() if isinstance(p, DTensor) else p for p in self.sharded]

    def backward(self) -> None:
        self.looked = False
        loss = self.forward()
        if self.session is not None:
            self.session.begin_step()
        loss.backward()

    def train(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.session is not None:
            self.session.end_step()

    def accumulate(self) -> None:
        self.model.set_requires_gradient_sync(False)  # type: ignore[operator]
        self.backward()
        self.model.set_requires_gradient_sync(True)  # type: ignore[operator]
        self.train()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self.forward()
        self.model.train()
        self.keep_nothing()

    @torch.no_grad()
    def look(self) -> None:
        self.forward()
        self.looked = True
        self.keep_nothing()

    def keep_nothing(self) -> None:
        """FSDP2 by itself goes on with the root's weights of a forward pass that no backward pass has followed."""
        if self.session is None:
            self.reshard()

    def mode(self) -> None:
        self.model.train(not self.model.training)

    def edit(self) -> None:
        """Past the version counters. Between a forward pass in training and backward it has to be announced."""
        if self.looked and self.session is not None:
            self.session.weights_changed()
        for shard in self.shards():
            shard.data.mul_(0.97)

    def save(self) -> None:
        with self.saving("some.ckpt") as stamp:
            self.saved = (stamp, [shard.clone() for shard in self.shards()])

    def saving(self, name: str) -> Any:
        return contextlib.nullcontext() if self.session is None else self.session.save(self.folder / name)

    @torch.no_grad()
    def load(self) -> None:
        if self.saved is not None:
            stamp, values = self.saved
            for shard, value in zip(self.shards(), values, strict=True):
                shard.copy_(value)
            if self.session is not None:
                self.session.load(self.folder / "some.ckpt", stamp)

    def freeze(self) -> None:
        self.turn(False)

    def unfreeze(self) -> None:
        self.turn(True)

    def turn(self, trains: bool) -> None:
        self.reshard()
        self.model[1].requires_grad_(trains)

    @torch.no_grad()
    def glance(self) -> None:
        """A validation and a checkpoint that nobody asked for."""
        training = self.model.training
        self.model.eval()
        self.model(torch.ones(4, WIDTH))
        self.model.train(training)
        with self.saving("other.ckpt"):
            pass

    def run(self, seed: int, *, glances: bool = False) -> list[float]:
        chosen = random.Random(seed)
        for _ in range(LENGTH):
            getattr(self, chosen.choice(ACTIONS))()
            if glances:
                self.glance()
        self.model.train()
        self.train()
        self.forward()
        if self.session is not None:
            self.session.close()
        return [*self.seen, *(float(shard.double().sum()) for shard in self.shards())]


def _programs(rank: int, world_size: int, folder: Path, kind: str, shard_size: int | None, seeds: range) -> Any:
    """Seeds of which a run is not the reference's, and which."""
    join_group(rank, world_size, folder, 30)
    wrong = []
    with nodes_of(2):
        for seed in seeds:
            gc.collect()  # groups of gloo keep their threads as long as anything refers to them
            own = folder / str(seed)
            compressor = LoCo(block_size=32) if seed % 2 else Dense()
            runs = [Program(weights, compressor, own, shard_size).run(seed) for weights in KEEPS[kind]]
            if kind == "delta":
                runs.append(Program(KEEPS[kind][0], compressor, own, shard_size).run(seed, glances=True))
            wrong += [(seed, at) for at, run in enumerate(runs) if run != runs[0]]
            if kind == "exact" and isinstance(compressor, Dense):
                plain = Program(None, None, own, shard_size).run(seed)
                wrong += [] if close(runs[0], plain, 1e-5) else [(seed, "FSDP2 without this package")]
    return wrong


LAYOUTS = {"fsdp": (2, None), "two levels": (4, None), "hsdp": (4, 2)}


QUICK = [
    ("fsdp", "code", range(1, 2)),
    ("fsdp", "exact", range(1)),
    ("two levels", "code", range(1, 2)),
    ("hsdp", "code", range(1, 2)),
]
SLOW = [(layout, kind, range(at, at + 50)) for layout in LAYOUTS for kind in KEEPS for at in (0, 50)]


@pytest.mark.parametrize(
    ("layout", "kind", "seeds"), QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW], ids=str
)
def test_what_is_kept_is_never_seen_when_it_is_old(tmp_path: Path, layout: str, kind: str, seeds: range) -> None:
    """Of each layout 300 sequences in all."""
    world_size, shard_size = LAYOUTS[layout]
    found = run_ranks(_programs, world_size, tmp_path, kind, shard_size, seeds, timeout=280, process_group=None)
    assert found == [[]] * world_size
