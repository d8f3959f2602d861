"""HSDP: sharded inside a node, compressed between the replicas, on four real processes that stand for two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lowbit_strategy import LoCo
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.hooks.overlap import OverlappedRunner
from lowbit_strategy.model.differing import differing
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_any
from lowbit_strategy.model.mesh import give_replicas
from lowbit_strategy.model.sharded import sharded_groups
from lowbit_strategy.plan.running import plan_of
from lowbit_strategy.ranks.topology import find_topology, resolve_shard_size
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.training.accelerated import fresh_state, fsdp_plugin, prepared, train
from testing.training.comparing import fingerprint, full_parameters
from testing.training.hf_trainer import losses as hf_losses
from testing.training.hf_trainer import trainer as hf_trainer
from testing.training.hsdp import Run, hsdp
from testing.training.regression import (
    OUTPUTS,
    WIDTH,
    ByStep,
    Regression,
    dataset,
    loader,
    mlp,
    trainer,
)


class ByName(NamedTuple):
    """Whole weights after DDP and without compression; a compressed run, its bytes and the elements of this rank."""

    stock: dict[str, Tensor]
    dense: dict[str, Tensor]
    run: Run
    sent: int
    accounted: int
    numel: int
    batches: int


def by_name(folder: Path) -> ByName:
    weights = {}
    with nodes_of(2):
        for name in ("ddp", "dense_hsdp", "loco_hsdp"):
            torch.manual_seed(0)
            model = Regression()
            made = trainer(name, max_steps=8)
            made.fit(model, loader())
            weights[name] = full_parameters(model)
    sync = made.strategy.sync
    return ByName(
        stock=weights["ddp"],
        dense=weights["dense_hsdp"],
        run=Run.of(model.losses, model, sync),
        sent=sync.ranks.peers.sent_nbytes,
        accounted=8 * sum(sync.state.sent_nbytes(name) for name in sync.specs),
        numel=sum(spec.numel for spec in sync.specs.values()),
        batches=len(made.train_dataloader),
    )


@scenarios(by_name, world_size=4)
def test_by_name(facts: list[ByName]) -> None:
    for rank in facts:
        assert rank.run.bits == facts[0].run.bits
        assert (rank.run.peers, rank.run.world_size, rank.run.steps) == (2, 4, 8)
        assert rank.batches == 6  # of 24: every rank has its own
        assert rank.run.losses[-1] < 0.8 * rank.run.losses[0]
        torch.testing.assert_close(rank.dense, rank.stock)
        headers_and_padding = 8 * 2 * 3 * (16 + 6 * 15)
        assert rank.accounted < rank.sent <= rank.accounted + headers_and_padding
    assert sum(rank.numel for rank in facts) == 2 * sum(value.numel() for value in facts[0].stock.values())


class Resumed(NamedTuple):
    """A run, the same from a checkpoint in its middle, and one from there with a replica on every rank."""

    whole: Run
    again: Run
    four: Run
    exchanges: int
    log: str


def resume(folder: Path, distributed: bool) -> Resumed:
    """Accumulation, clipping and another number of replicas on the way."""
    given: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    with nodes_of(2):
        whole = ByStep()
        saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
        made = trainer(
            hsdp(save_distributed_checkpoint=distributed), enable_checkpointing=True, callbacks=[saving], **given
        )
        with count_exchanges() as sizes:
            made.fit(whole, loader())
        model, other = ByStep(), ByStep()
        resumed = trainer(hsdp(save_distributed_checkpoint=distributed), **given)
        resumed.fit(model, loader(), ckpt_path=folder / "step=3.ckpt")
        with listen() as lines:
            four = trainer(
                hsdp(shard_size=1, on_world_size_change="fold", save_distributed_checkpoint=distributed), **given
            )
            four.fit(other, loader(), ckpt_path=folder / "step=3.ckpt")
    return Resumed(
        whole=Run.of(whole.losses, whole, made.strategy.sync),
        again=Run.of(model.losses, model, resumed.strategy.sync),
        four=Run.of(other.losses, other, four.strategy.sync),
        exchanges=len(sizes),
        log="\n".join(lines),
    )


@scenarios(resume, world_size=4, distributed=(False, True), slow=all_but(distributed=True))
def test_resume_is_as_if_never_stopped(facts: list[Resumed]) -> None:
    for rank in facts:
        assert rank.again.losses == rank.whole.losses[6:]
        assert rank.again.bits == rank.whole.bits == facts[0].whole.bits
        assert rank.exchanges == facts[0].exchanges
        assert rank.four.bits == facts[0].four.bits
        assert rank.four.losses[0] == rank.again.losses[0]
        assert (rank.four.peers, rank.four.steps) == (4, 6)
    assert "grouped into other nodes or replicas: compression residuals are averaged" in facts[0].log


def accelerator(*, own: bool, shard_size: Any = "node") -> Accelerator:
    """On CPU Accelerate refuses a `ParallelismConfig`: what its constructor would do with one is done here."""
    fresh_state()
    sharding = fsdp_plugin()
    made = Accelerator(fsdp_plugin=sharding)
    if own:
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        made.state.parallelism_config = config
        made.state.device_mesh = config.get_device_mesh("cpu")
    LowBitPlugin(LoCo(), shard_size=None if own else shard_size).attach(made, fsdp_plugin=sharding)
    return made


class Accelerated(NamedTuple):
    """Under Accelerate's own HSDP, by the plugin's `shard_size`, and the first from a checkpoint after four steps."""

    own: Run
    plugin: Run
    again: Run
    batches: dict[str, int]


def with_accelerate(folder: Path) -> Accelerated:
    runs, batches = {}, {}
    with nodes_of(2):
        for name in ("own", "plugin"):
            job = prepared(accelerator(own=name == "own"))
            train(job, 4, clip=1.0)
            job.accelerator.save_state(str(folder / name))
            train(job, 6, skip=4)
            runs[name] = Run.of(job.losses, job.model, job.sync)
            batches[name] = len(job.batches)
        job = prepared(accelerator(own=True))
        job.accelerator.load_state(str(folder / "own"))
        train(job, 6, skip=4)
    return Accelerated(**runs, again=Run.of(job.losses, job.model, job.sync), batches=batches)


@pytest.mark.slow
@scenarios(with_accelerate, world_size=4)
def test_accelerate(facts: list[Accelerated]) -> None:
    for rank in facts:
        assert rank.own == rank.plugin
        assert rank.batches["own"] == rank.batches["plugin"]
        assert (rank.own.peers, rank.own.steps) == (2, 6)
        assert rank.own.bits == facts[0].own.bits == rank.again.bits
        assert rank.again.losses == rank.own.losses[4:]


def with_trainer(folder: Path) -> dict[str, Run]:
    """The HF Trainer: accumulation, and a checkpoint in the middle."""
    runs = {}
    with nodes_of(2):
        for name, start in (("whole", None), ("resumed", str(folder / "checkpoint-4"))):
            made = hf_trainer(folder, "fsdp", LowBitPlugin(LoCo(), shard_size="node"), gradient_accumulation_steps=2)
            made.train(resume_from_checkpoint=start)
            binding = binding_of(made.accelerator)
            assert binding is not None
            runs[name] = Run.of(hf_losses(made), made.model, binding.sync)
    return runs


@pytest.mark.slow
@scenarios(with_trainer, world_size=4)
def test_hf_trainer(facts: list[dict[str, Run]]) -> None:
    for rank in facts:
        whole = rank["whole"]
        assert whole == rank["resumed"]
        assert whole.bits == facts[0]["whole"].bits
        assert (whole.peers, whole.world_size, whole.steps) == (2, 4, 8)
        assert whole.losses[-1] < whole.losses[0] - 0.3


class SometimesIdle(Regression):
    """One layer of a block that is sharded together is used in every other step."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, OUTPUTS)))
        self.extra = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + (self.extra(x) if self.global_step % 2 else 0.0)


class InStep(NamedTuple):
    """A run of which `at_once` says what the worker was given, its bytes inside a node, and what replicas agree on."""

    at_once: list[bool]
    run: Run
    sent: int
    planned: int
    first_bits: int
    differs: list[str]
    log: str


def in_step(folder: Path) -> InStep:
    """What travels when: the worker has all modules of a backward pass at once; replicas are compared."""
    at_once: list[bool] = []
    original = OverlappedRunner.run

    def noted(self: OverlappedRunner, stages: Any, result: Tensor, **options: bool) -> None:
        at_once.append(options["blocking"])
        original(self, stages, result, **options)

    with nodes_of(2), mock.patch.object(OverlappedRunner, "run", noted):
        with listen() as lines:
            made = trainer(hsdp(), max_steps=4)
            model = SometimesIdle()
            made.fit(model, loader())
        sync = made.strategy.sync
        sent, planned = sync.ranks.intra_node.sent_nbytes, plan_of(sync).intra_node_nbytes
        torch.manual_seed(dist.get_rank() // 2)  # every replica begins with weights of its own
        net = sharded_on_meta()
        first_bits = fingerprint(net)
        local = next(net.parameters()).detach().to_local()
        local += dist.get_rank()
        differs = list(differing({"weight": next(net.parameters())}, GroupComm(), torch.device("cpu")))
    run = Run.of(model.losses, model, sync)
    return InStep(list(at_once), run, sent, planned, first_bits, differs, "\n".join(lines))


def sharded_on_meta() -> nn.Module:
    """A module that is sharded before its weights exist."""
    with torch.device("meta"):
        net = nn.Linear(16, 8)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "data_parallel"))
    prepared_model = prepare(net, LoCo(), SyncOptions(shard_size=2), scatter=True)
    shard_any(net, mesh["data_parallel"], torch.device("cpu"), ShardPolicy())
    attach_fsdp(net, prepared_model, device=torch.device("cpu"))
    return net


@scenarios(in_step, world_size=4)
def test_overlap_unused_parameters_and_replicas_that_differ(facts: list[InStep]) -> None:
    for rank in facts:
        assert not any(rank.at_once)
        assert rank.run.bits == facts[0].run.bits
        assert rank.first_bits == facts[0].first_bits
        assert rank.run.steps == 4
        assert rank.sent == 4 * rank.planned > 0
        assert rank.differs == ["weight"]
    assert "over 2 groups of 2 ranks, exact inside a group" in facts[0].log
    assert "between nodes" in facts[0].log


class InFabric(NamedTuple):
    run: Run
    sampler: dict[str, int]


def with_fabric(folder: Path) -> InFabric:
    with nodes_of(2):
        made = L.Fabric(accelerator="cpu", devices=4, strategy="loco_hsdp")
        made.launch()
        net = mlp()
        model, optimizer = made.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
        losses = []
        for step in range(24):
            x, y = dataset()[(4 * step + made.global_rank) % 24 * 4 :][:4]
            with made.no_backward_sync(model, enabled=step % 2 == 0):
                losses.append(F.mse_loss(model(x), y))
                made.backward(losses[-1])
            if step % 2:
                made.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        run = Run.of([loss.item() for loss in losses], net, made.strategy.sessions[0].sync)
    return InFabric(run, made.strategy.distributed_sampler_kwargs)


@scenarios(with_fabric, world_size=4)
def test_fabric(facts: list[InFabric]) -> None:
    for number, rank in enumerate(facts):
        run = rank.run
        assert run.bits == facts[0].run.bits
        assert (run.peers, run.world_size, run.steps) == (2, 4, 12)
        assert rank.sampler == {"num_replicas": 4, "rank": number}
        assert sum(run.losses[-4:]) < 0.9 * sum(run.losses[:4])


def refused(folder: Path) -> Facts:
    def resolve(num_ranks: int | str, shard_size: Any, num_parts: int = 1) -> str:
        with nodes_of(num_ranks):
            return raised(lambda: resolve_shard_size(shard_size, find_topology(), num_parts))

    def prepare_with(shard_size: Any, *, scatter: bool) -> str:
        return raised(lambda: prepare(mlp(), LoCo(), SyncOptions(shard_size=shard_size), scatter=scatter))

    rank = dist.get_rank()
    net = mlp()
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with nodes_of(2):
        sharded = prepare(net, LoCo(), SyncOptions(shard_size=2), scatter=True)
        return {
            "too large": resolve(2, 4),
            "does not divide": resolve(4, 3),
            "parts": resolve(2, "node", 4),
            "uneven": resolve(3 if rank < 3 else 1, "node"),
            "topology": resolve(2 if rank == 0 else 4, 2),
            "differs": prepare_with(1 + rank % 2, scatter=True),
            "ddp": prepare_with(2, scatter=False),
            "size": raised(lambda: attach_fsdp(net, sharded, device=torch.device("cpu"))),
            "mesh": raised(lambda: give_replicas(sharded_groups(net), mesh)),
            "trainer": raised(lambda: trainer(hsdp(shard_size=3), max_steps=1).fit(Regression(), loader())),
            "plugin": raised(lambda: accelerator(own=False, shard_size=3)),
        }


@scenarios(refused, world_size=4)
def test_bad_input(facts: list[Facts]) -> None:
    for rank in facts:
        assert "shard_size=4 does not divide the ranks of a node (2, 2)" in rank["too large"]
        assert "shard_size=3 does not divide the ranks of a node (4)" in rank["does not divide"]
        assert "shard_size=1 for each of 4 tensor-parallel ranks does not divide" in rank["parts"]
        assert "nodes have different numbers of ranks (3, 1)" in rank["uneven"]
        assert "ranks disagree about the topology: rank 0 has LOCAL_WORLD_SIZE=2 and rank 1" in rank["topology"]
        assert "rank 1 differs from rank 0 in shard_size: 2 instead of 1" in rank["differs"]
        assert "shard_size is an option of FSDP2 strategies" in rank["ddp"]
        assert "shard_size=2 was asked for, and the model is sharded over 4 ranks" in rank["size"]
        assert (
            "is sharded over the ranks [0, 1, 2, 3], which are not a row of the mesh [[0, 1], [2, 3]]" in rank["mesh"]
        )
        assert "shard_size=3 does not divide the ranks of a node (2, 2)" in rank["trainer"]
        assert "shard_size=3 does not divide the ranks of a node (2, 2)" in rank["plugin"]
