"""HSDP: sharded inside a node, compressed between the replicas, on four real processes that stand for two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lowbit_strategy import DiLoCo, LoCo
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.attach.attach import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.hooks.worker import BackwardSide
from lowbit_strategy.lightning import LowBitFSDPStrategy
from lowbit_strategy.model.digest import ParameterDigest
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_any
from lowbit_strategy.ranks.topology import hybrid_mesh
from testing.counting.traffic import count_exchanges
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.accelerated import fresh_state, fsdp_plugin, prepared, train
from testing.training.comparing import fingerprint, full_parameters
from testing.training.hf_trainer import losses as hf_losses
from testing.training.hf_trainer import trainer as hf_trainer
from testing.training.regression import (
    MIN_SHARD_NUMEL,
    OUTPUTS,
    WIDTH,
    ByStep,
    Regression,
    dataset,
    loader,
    mlp,
    trainer,
)


def hsdp(compressor: Any = None, **options: Any) -> LowBitFSDPStrategy:
    compressor = compressor if compressor is not None else LoCo(block_size=32)
    options = {"shard_size": "node", "min_shard_numel": MIN_SHARD_NUMEL} | options
    return LowBitFSDPStrategy(compressor, **options)


def by_name(folder: Path) -> Facts:
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for name in ("ddp", "dense_hsdp", "loco_hsdp"):
            torch.manual_seed(0)
            model = Regression()
            made = trainer(name, max_steps=20)
            made.fit(model, loader())
            runs[name] = {"losses": model.losses, "values": {k: v.tolist() for k, v in full_parameters(model).items()}}
    sync = made.strategy.sync
    return {
        **runs,
        "print": fingerprint(model),
        "peers": sync.ranks.peers.world_size,
        "world_size": sync.ranks.world_size,
        "sent": sync.ranks.peers.sent_nbytes,
        "accounted": 20 * sum(sync.state.sent_nbytes(name) for name in sync.specs),
        "numel": sum(spec.numel for spec in sync.specs.values()),
        "steps": sync.step_index,
        "batches": len(made.train_dataloader),
    }


@scenarios(by_name, world_size=4)
def test_by_name(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert (rank["peers"], rank["world_size"]) == (2, 4)
        assert rank["steps"] == 20
        assert rank["batches"] == 6  # of 24: every rank has its own
        assert rank["loco_hsdp"]["losses"][-1] < 0.8 * rank["loco_hsdp"]["losses"][0]
        for name, values in rank["ddp"]["values"].items():
            torch.testing.assert_close(torch.tensor(rank["dense_hsdp"]["values"][name]), torch.tensor(values))
        headers_and_padding = 20 * 2 * 3 * (16 + 6 * 15)
        assert rank["accounted"] < rank["sent"] <= rank["accounted"] + headers_and_padding
    assert sum(rank["numel"] for rank in facts) == 2 * sum(
        torch.tensor(v).numel() for v in facts[0]["ddp"]["values"].values()
    )


def resume(folder: Path, distributed: bool) -> Facts:
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
        trainer(hsdp(save_distributed_checkpoint=distributed), **given).fit(
            model, loader(), ckpt_path=folder / "step=3.ckpt"
        )
        with listen() as lines:
            four = trainer(
                hsdp(shard_size=1, on_world_size_change="fold", save_distributed_checkpoint=distributed), **given
            )
            four.fit(other, loader(), ckpt_path=folder / "step=3.ckpt")
    return {
        "after the checkpoint": whole.losses[6:],
        "resumed": model.losses,
        "same": fingerprint(whole) == fingerprint(model),
        "print": fingerprint(whole),
        "exchanges": len(sizes),
        "four replicas": {
            "print": fingerprint(other),
            "losses": other.losses,
            "steps": four.strategy.sync.step_index,
        },
        "log": lines,
    }


@scenarios(resume, world_size=4, distributed=(False, True))
def test_resume_is_as_if_never_stopped(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["resumed"] == rank["after the checkpoint"]
        assert rank["same"]
        assert rank["print"] == facts[0]["print"]
        assert rank["exchanges"] == facts[0]["exchanges"]
        assert rank["four replicas"]["print"] == facts[0]["four replicas"]["print"]
        assert rank["four replicas"]["losses"][0] == rank["resumed"][0]
        assert rank["four replicas"]["steps"] == 6
    assert "grouped into nodes or replicas otherwise: compression residuals are averaged" in "\n".join(facts[0]["log"])


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


def with_accelerate(folder: Path) -> Facts:
    """Accelerate's own HSDP; the plugin's `shard_size` is the same."""
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for own in (True, False):
            job = prepared(accelerator(own=own))
            train(job, 4, clip=1.0)
            job.accelerator.save_state(str(folder / str(own)))
            train(job, 6, skip=4)
            runs["accelerate" if own else "plugin"] = {
                "losses": job.losses,
                "print": fingerprint(job.model),
                "replicas": job.sync.ranks.peers.world_size,
                "steps": job.sync.step_index,
                "samples": len(job.batches),
            }
        again = prepared(accelerator(own=True))
        again.accelerator.load_state(str(folder / "True"))
        train(again, 6, skip=4)
    return runs | {"resumed": again.losses, "resumed_print": fingerprint(again.model)}


@scenarios(with_accelerate, world_size=4)
def test_accelerate(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["accelerate"] == rank["plugin"]
        assert rank["accelerate"]["replicas"] == 2
        assert rank["accelerate"]["steps"] == 6
        assert rank["accelerate"]["print"] == facts[0]["accelerate"]["print"] == rank["resumed_print"]
        assert rank["resumed"] == rank["accelerate"]["losses"][4:]


class Run(NamedTuple):
    """What a rank has come to, and among how many others that get compressed messages of it, out of how many."""

    losses: list[float]
    bits: int
    steps: int
    peers: int
    world_size: int

    @classmethod
    def of(cls, losses: list[float], model: nn.Module, sync: Any) -> Run:
        return cls(losses, fingerprint(model), sync.step_index, sync.ranks.peers.world_size, sync.ranks.world_size)


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


def in_step(folder: Path) -> Facts:
    """What travels when: the worker has all modules of a backward pass at once; replicas are compared."""
    at_once: list[bool] = []
    run = BackwardSide.run

    def noted(self: BackwardSide, stages: Any, result: Tensor, **options: bool) -> None:
        at_once.append(options["at_once"])
        run(self, stages, result, **options)

    errors = {}
    with nodes_of(2), mock.patch.object(BackwardSide, "run", noted):
        with listen() as lines:
            made = trainer(hsdp(), max_steps=4)
            model = SometimesIdle()
            made.fit(model, loader())
        sync = made.strategy.sync
        facts = {"at_once": list(at_once), "print": fingerprint(model), "log": lines, "steps": sync.step_index}
        facts |= {"sent": sync.ranks.intra_node.sent_nbytes, "planned": sync.plan().intra_node_nbytes}
        torch.manual_seed(dist.get_rank() // 2)  # every replica begins with weights of its own
        net = sharded_on_meta()
        facts["begins"] = fingerprint(net)
        local = next(net.parameters()).detach().to_local()
        digest = ParameterDigest({"weight": next(net.parameters())}, GroupComm(), torch.device("cpu"))
        local += dist.get_rank()
        errors["differs"] = raised(lambda: digest.compare(3))
    return facts | errors


def sharded_on_meta() -> nn.Module:
    """A module that is sharded before its weights exist."""
    with torch.device("meta"):
        net = nn.Linear(16, 8)
    mesh = hybrid_mesh("cpu", 4, 2)
    prepared_model = prepare(net, LoCo(), SyncOptions(shard_size=2), scatter=True)
    shard_any(net, mesh["data_parallel"], torch.device("cpu"), ShardPolicy())
    attach_fsdp(net, prepared_model, device=torch.device("cpu"))
    return net


@scenarios(in_step, world_size=4)
def test_overlap_unused_parameters_and_replicas_that_differ(facts: list[Facts]) -> None:
    for rank in facts:
        assert not any(rank["at_once"])
        assert rank["print"] == facts[0]["print"]
        assert rank["begins"] == facts[0]["begins"]
        assert rank["steps"] == 4
        assert rank["sent"] == 4 * rank["planned"] > 0
        assert "no longer hold the same parameters" in rank["differs"]
    log = "\n".join(facts[0]["log"])
    assert "over 2 groups of 2 ranks, exact inside a group" in log
    assert "between nodes" in log


def with_fabric(folder: Path) -> Facts:
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
    return {"run": run, "samples": made.strategy.distributed_sampler_kwargs}


@scenarios(with_fabric, world_size=4)
def test_fabric(facts: list[Facts]) -> None:
    for number, rank in enumerate(facts):
        run = rank["run"]
        assert run.bits == facts[0]["run"].bits
        assert (run.peers, run.world_size, run.steps) == (2, 4, 12)
        assert rank["samples"] == {"num_replicas": 4, "rank": number}
        assert sum(run.losses[-4:]) < 0.9 * sum(run.losses[:4])


def refused(folder: Path) -> Facts:
    def prepare_with(num_ranks: int | str, shard_size: Any, **options: Any) -> str:
        with nodes_of(num_ranks):
            options = {"scatter": True} | options
            return raised(lambda: prepare(mlp(), LoCo(), SyncOptions(shard_size=shard_size), **options))

    rank = dist.get_rank()
    net = mlp()
    fully_shard(net, mesh=init_device_mesh("cpu", (4,)))
    both = mlp()
    fully_shard(both, mesh=init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard")))
    with nodes_of(2):
        sharded = prepare(net, LoCo(), SyncOptions(shard_size=2), scatter=True)
        flat = prepare(both, LoCo(), SyncOptions(), scatter=True)
        return {
            "too large": prepare_with(2, 4),
            "does not divide": prepare_with(4, 3),
            "uneven": prepare_with(3 if rank < 3 else 1, "node"),
            "topology": prepare_with(2 if rank == 0 else 4, 2),
            "differs": prepare_with(4, 1 + rank % 2),
            "ddp": prepare_with(2, 2, scatter=False),
            "mesh": raised(lambda: attach_fsdp(net, sharded, device=torch.device("cpu"))),
            "replicated": raised(lambda: attach_fsdp(both, flat, device=torch.device("cpu"))),
            "trainer": raised(lambda: trainer(hsdp(shard_size=3), max_steps=1).fit(Regression(), loader())),
            "plugin": raised(lambda: accelerator(own=False, shard_size=3)),
        }


@scenarios(refused, world_size=4)
def test_bad_input(facts: list[Facts]) -> None:
    for rank in facts:
        assert "shard_size=4 does not divide the ranks of a node (2, 2)" in rank["too large"]
        assert "shard_size=3 does not divide the ranks of a node (4)" in rank["does not divide"]
        assert "nodes have different numbers of ranks (3, 1)" in rank["uneven"]
        assert "ranks disagree about the topology: rank 0 has LOCAL_WORLD_SIZE=2 and rank 1" in rank["topology"]
        assert "rank 1 differs from rank 0 in shard_size: 2 instead of 1" in rank["differs"]
        assert "shard_size is an option of FSDP2 strategies" in rank["ddp"]
        assert (
            "is sharded over the ranks [0, 1, 2, 3], but gradients are compressed over the replicas of" in rank["mesh"]
        )
        assert "give compression shard_size=4 as well" in rank["replicated"]
        assert "shard_size=3 does not divide the ranks of a node (2, 2)" in rank["trainer"]
        assert "shard_size=3 does not divide the ranks of a node (2, 2)" in rank["plugin"]


OUTER = DiLoCo(every=4, momentum=0.5, average_state={"exp_avg": 1, "exp_avg_sq": 2}, synchronous_end=2, num_steps=11)


def local_steps(folder: Path) -> Facts:
    """Two nodes of two ranks: sharded inside, local steps between."""
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    with nodes_of(2):
        whole = ByStep()
        made = trainer(hsdp(outer=OUTER), max_steps=11, callbacks=[saver], enable_checkpointing=True)
        made.fit(whole, loader())
        again = ByStep()
        trainer(hsdp(outer=OUTER), max_steps=11).fit(again, loader(), ckpt_path=folder / "step=6.ckpt")
        named = trainer("diloco_hsdp", max_steps=31)
        named.fit(Regression(), loader())
        refused = raised(lambda: trainer(LowBitFSDPStrategy(outer="diloco"), max_steps=1).fit(Regression(), loader()))
    thirty = named.strategy.sync
    numel = sum(param.numel() for param in whole.parameters())
    return {
        "whole": Run.of(whole.losses, whole, made.strategy.sync),
        "again": again.losses,
        "again bits": fingerprint(again),
        "between": thirty.ranks.peers.sent_nbytes / 31,
        "ring": 4 * 2 * 3 / 4 * numel,
        "refused": refused,
    }


@scenarios(local_steps, world_size=4)
def test_local_steps_between_nodes(facts: list[Facts]) -> None:
    for rank in facts:
        whole = rank["whole"]
        assert rank["again bits"] == whole.bits == facts[0]["whole"].bits
        assert rank["again"] == whole.losses[6:]
        assert (whole.peers, whole.world_size, whole.steps) == (2, 4, 11)
        assert "shard_size" in rank["refused"]


# -- validation of local steps ----------------------------------------------------------------------------------------


def validates_anchors(folder: Path, by: str, weights: str) -> Facts:
    """The root group stays gathered after a validation, with the anchors in the place of the rank's own weights."""
    losses = {}
    for validates in (True, False):
        torch.manual_seed(0)
        model = ByStep()
        options: dict[str, Any] = {"limit_val_batches": 1 if validates else 0, "val_check_interval": 3}
        callbacks = [AnchorsInBetween()] if by == "callback" and validates else []
        if by == "callback":
            options["limit_val_batches"] = 0
        with nodes_of(2):
            made = trainer(
                hsdp(outer=DiLoCo(every=7), weights=weights), max_steps=10, num_sanity_val_steps=0,
                callbacks=callbacks, **options,
            )  # fmt: skip
            made.fit(model, loader(), loader())
        losses[validates] = model.losses
    return losses


class AnchorsInBetween(L.Callback):
    """Looks at the anchors while the model is in training mode, as a loop of one's own may."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step in (3, 8):
            with trainer.strategy.session.shared_weights(), torch.no_grad():  # type: ignore[attr-defined]
                pl_module(dataset()[:4][0])


@scenarios(validates_anchors, world_size=4, by=("trainer", "callback"), weights=("exact", "code8"))
def test_local_steps_are_the_same_with_and_without_validation(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank[True] == rank[False]
