"""A run with X is bit-identical to the run without X: for each X, layout and kind of model of the tables below."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import (
    DiLoCo,
    Exact,
    LocalSGD,
    LoCo,
    OverlapLocalSGD,
    PostLocalSGD,
    SparseLoCo,
    WeightCode,
    WeightDelta,
)
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, attach_fsdp, prepare
from lowbit_strategy.lightning import CompressionMonitor, LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_any
from testing.processes.node_size import nodes_of
from testing.processes.ranks import join_group, run_ranks
from testing.training.comparing import checksum, full, full_parameters
from testing.training.ddp_loop import CPU
from testing.training.regression import ByStep, dataset, loader, mlp, trainer

STEPS = 20
COMPRESSOR = LoCo(block_size=32)


class Print(NamedTuple):
    """Of a run: its weights, its losses, and the buffers of rank 0 and of this rank."""

    weights: int
    losses: list[float]
    first_buffers: int
    own_buffers: int


class Layout(NamedTuple):
    """How a model is spread: ``fsdp`` or DDP, by Lightning's own strategy without options; ranks in all, of a node."""

    fsdp: bool
    options: dict[str, Any] | None
    world_size: int = 2
    per_node: int = 2


LAYOUTS = {
    "stock ddp": Layout(False, None),
    "ddp": Layout(False, {}),
    "fsdp exact": Layout(True, {"weights": "exact"}),
    "fsdp replica": Layout(True, {"weights": Exact(keep="replica")}),
    "fsdp code": Layout(True, {"weights": WeightCode(block_size=32)}),
    "fsdp code, nothing kept": Layout(True, {"weights": WeightCode(block_size=32, keep="nothing")}),
    "fsdp delta": Layout(True, {"weights": WeightDelta(block_size=32)}),
    "replicas": Layout(True, {"shard_size": 1}),
    "diloco": Layout(False, {"outer": DiLoCo(every=6)}),
    "streaming": Layout(False, {"outer": DiLoCo(every=6, fragments=3, delay=1, mix=0.5)}),
    "localsgd": Layout(False, {"outer": LocalSGD(every=3)}),
    "overlap": Layout(False, {"outer": OverlapLocalSGD(every=4)}),
    "postlocal": Layout(False, {"outer": PostLocalSGD(every=3, synchronous=8)}),
    "sparseloco": Layout(False, {"outer": SparseLoCo(every=4)}),
    "two levels, ddp": Layout(False, {}, 4),
    "two levels, code": Layout(True, {"weights": WeightCode(block_size=32)}, 4),
    "two levels, delta": Layout(True, {"weights": WeightDelta(block_size=32)}, 4),
    "hsdp": Layout(True, {"shard_size": "node"}, 4),
    "hsdp code": Layout(True, {"shard_size": "node", "weights": WeightCode(block_size=32)}, 4),
    "hsdp diloco": Layout(True, {"shard_size": "node", "outer": DiLoCo(every=6)}, 4),
    "codes inside, ddp": Layout(False, {"intra": 8}, 4),
    "codes inside, far": Layout(True, {"intra": 8, "far_links": True, "weights": WeightCode(block_size=32)}, 4),
    "codes inside, hsdp diloco": Layout(True, {"intra": 8, "shard_size": "node", "outer": DiLoCo(every=6)}, 4),
    "far ddp": Layout(False, {"far_links": True}),
    "far fsdp": Layout(True, {"far_links": True, "weights": WeightCode(block_size=32)}),
    "far fsdp delta": Layout(True, {"far_links": True, "weights": WeightDelta(block_size=32)}),
    "far code, two levels": Layout(True, {"far_links": True, "weights": WeightCode(block_size=32)}, 4),
    "far delta, two levels": Layout(True, {"far_links": True, "weights": WeightDelta(block_size=32)}, 4),
    "far replicas": Layout(True, {"far_links": True, "shard_size": 1}),
    "far diloco": Layout(False, {"far_links": True, "outer": DiLoCo(every=6)}),
    "squares, ddp": Layout(False, {"second_moment": True}),
    "squares, code": Layout(True, {"second_moment": True, "weights": WeightCode(block_size=32)}),
    "squares, replicas": Layout(True, {"second_moment": True, "shard_size": 1}),
    "squares, two levels": Layout(True, {"second_moment": True, "weights": WeightCode(block_size=32)}, 4),
    "squares, hsdp": Layout(True, {"second_moment": True, "shard_size": "node"}, 4),
    "hsdp streaming": Layout(True, {"shard_size": "node", "outer": DiLoCo(every=6, fragments=2, delay=1)}, 4),
}


class Tied(nn.Module):
    """A weight that is used twice, and a causal mask of -inf."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 128)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.tanh(self.embed(x)).view(-1, 4, 32)
        scores = (parts @ parts.mT + self.mask).softmax(-1)
        out: Tensor = ((scores @ parts).flatten(1) @ self.embed.weight)[:, :8]
        return out


def frozen() -> nn.Module:
    net = mlp()
    net[0].requires_grad_(False)
    return net


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 8))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": mlp,
    "tied": Tied,
    "batch norm": normalized,
    "frozen": frozen,
    "unsharded root": mlp,
}


def bits(model: nn.Module, losses: list[float]) -> Print:
    own = checksum(full(buffer) for buffer in model.buffers())
    first = torch.tensor(own)
    dist.broadcast(first, 0)
    return Print(checksum(full_parameters(model).values()), losses, int(first), own)


class Same:
    """One layout and kind of model, trained again and again."""

    def __init__(self, folder: Path, layout: Layout, kind: str) -> None:
        self.folder, self.layout, self.kind = folder, layout, kind
        self.min_shard_numel = 1 if kind == "unsharded root" else 2000
        self.last: Any = None

    def model(self) -> ByStep:
        torch.manual_seed(5)
        return ByStep(MODELS[self.kind]())

    def strategy(self) -> Any:
        if self.layout.options is None:
            return "ddp"
        if self.layout.fsdp:
            return LowBitFSDPStrategy(COMPRESSOR, min_shard_numel=self.min_shard_numel, **self.layout.options)
        return LowBitDDPStrategy(COMPRESSOR, **self.layout.options)

    def fit(self, *, validates: bool = False, start: Path | None = None, **given: Any) -> Print:
        model = self.model()
        options: dict[str, Any] = {"max_steps": STEPS, "num_sanity_val_steps": 0} | given
        self.last = trainer(self.strategy(), enable_checkpointing="callbacks" in given, **options)
        self.last.fit(model, loader(), loader(16) if validates else None, ckpt_path=start)
        return bits(model, model.losses)

    def twice(self, *, tests: bool) -> Print:
        """Two fits, with a test in between or without."""
        model = self.model()
        made = trainer(self.strategy(), max_steps=STEPS // 2)
        made.fit(model, loader())
        if tests:
            made.test(model, loader(16), verbose=False)
        made.fit_loop.epoch_loop.max_steps = STEPS
        made.fit(model, loader())
        return bits(model, model.losses)

    def by_hand(self) -> Print:
        model, world_size = self.model(), dist.get_world_size()
        options = SyncOptions(**(self.layout.options or {}))
        if is_ours := self.layout.fsdp or self.layout.options is not None:
            prepared = prepare(model, COMPRESSOR, options, scatter=self.layout.fsdp)
        if self.layout.fsdp:
            asked = options.shard_size
            size = self.layout.per_node if asked == "node" else asked or world_size
            mesh = init_device_mesh("cpu", (world_size // size, size), mesh_dim_names=("replicas", "shards"))
            shard_any(model, mesh["shards"], CPU, ShardPolicy(min_numel=self.min_shard_numel))
            wrapped: Any = model
            session = attach_fsdp(model, prepared, device=CPU)
        else:
            wrapped = DistributedDataParallel(model)
            session = attach_ddp(wrapped, prepared, device=CPU) if is_ours else None
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1e-2)
        if session is not None:
            session.bind(lambda: [optimizer], lambda: None)
            session.resume()
        losses = []
        for step in range(STEPS):
            at = (step * world_size + dist.get_rank()) * 4 % 96
            x, y = dataset()[at : at + 4]
            loss = F.mse_loss(wrapped(x), y)
            losses.append(loss.item())
            optimizer.zero_grad()
            if session is not None:
                session.begin_step()
            loss.backward()
            optimizer.step()
            if session is not None:
                session.end_step(optimizer)
        if session is not None:
            session.finish()
        found = bits(model, losses)
        if session is not None:
            session.close()
        return found

    def same(self, run: Print, without: Print, *, resumes: bool = False) -> bool:
        """DDP brings rank 0's buffers with each forward pass, so what the others had after the last one is their own.
        Lightning's checkpoints have rank 0's; with local steps each rank continues with its own.
        """
        local = self.layout.options is not None and "outer" in self.layout.options
        own = local or (self.layout.fsdp and not resumes)
        return run[:3] == without[:3] and (not own or run.own_buffers == without.own_buffers)

    def table(self) -> dict[str, bool]:
        """X -> whether the run with it is that without."""
        without = self.fit()
        stock = self.layout.options is None
        monitors = [] if stock else [CompressionMonitor(every_n_steps=3)]
        records = [] if stock else [CompressionMonitor(every_n_steps=4, record=str(self.folder / "record"))]
        saver = ModelCheckpoint(self.folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        runs = {
            "validation": self.fit(validates=True, val_check_interval=4),
            "validation first": self.fit(validates=True, val_check_interval=5, num_sanity_val_steps=1),
            "checkpoint": self.fit(callbacks=[saver]),
            "monitor and record": self.fit(callbacks=records),
            "hand-written loop": self.by_hand(),
        }
        found = {x: self.same(run, without) for x, run in runs.items()}
        found["test in between"] = self.same(self.twice(tests=True), self.twice(tests=False))
        resumed = self.fit(validates=True, val_check_interval=5, start=self.folder / "step=9.ckpt", callbacks=monitors)
        rest = without._replace(losses=without.losses[9:])
        return found | {"resumed with other callbacks": self.same(resumed, rest, resumes=True)}


def _tables(rank: int, world_size: int, folder: Path, names: list[tuple[str, str]]) -> dict[str, dict[str, bool]]:
    found = {}
    join_group(rank, world_size, folder, 60)
    for number, (layout, kind) in enumerate(names):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        chosen = LAYOUTS[layout]
        with nodes_of(chosen.per_node) if world_size > chosen.per_node else contextlib.nullcontext():
            found[f"{layout}, {kind}"] = Same(own, chosen, kind).table()
        dist.barrier()
    return found


def check(folder: Path, names: list[tuple[str, str]]) -> None:
    (world_size,) = {LAYOUTS[layout].world_size for layout, _ in names}
    for found in run_ranks(_tables, world_size, folder, names, timeout=280, process_group=None):
        differs = {name: [x for x, same in table.items() if not same] for name, table in found.items()}
        assert not {name: xs for name, xs in differs.items() if xs}
        assert len(found) == len(names)


@pytest.mark.parametrize(
    "names",
    [
        [("fsdp code", "tied")],
        pytest.param(
            [
                ("streaming", "batch norm"),
                ("squares, code", "frozen"),
                ("ddp", "batch norm"),
                ("fsdp delta", "unsharded root"),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param([("two levels, code", "plain"), ("hsdp diloco", "frozen")], marks=pytest.mark.slow),
    ],
    ids=["two ranks", "more layouts", "four ranks"],
)
def test_a_run_with_x_is_the_run_without(tmp_path: Path, names: list[tuple[str, str]]) -> None:
    check(tmp_path, names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_with_every_kind_of_model(tmp_path: Path, layout: str, kind: str) -> None:
    check(tmp_path, [(layout, kind)])
