"""Local steps between nodes: models sharded inside a node, on four real processes that stand for two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lowbit_strategy import DiLoCo
from lowbit_strategy import fabric as with_fabric
from lowbit_strategy.lightning import LowBitFSDPStrategy
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.fabric import batches, launch, setup, train
from testing.training.hsdp import Run, hsdp
from testing.training.random_loop.loop import local
from testing.training.regression import (
    ByStep,
    Regression,
    dataset,
    loader,
    mlp,
    trainer,
)

OUTER = DiLoCo(every=4, momentum=0.5)


class LocalSteps(NamedTuple):
    """Bytes are per step and rank: with local steps, and of a ring in float32 that has all gradients in every step."""

    whole: Run
    again: Run
    nbytes: float
    ring_nbytes: float
    refused: str


def local_steps(folder: Path) -> LocalSteps:
    """Two nodes of two ranks: sharded inside, local steps between."""
    saver = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    with nodes_of(2):
        whole = ByStep()
        made = trainer(hsdp(outer=OUTER), max_steps=11, callbacks=[saver], enable_checkpointing=True)
        made.fit(whole, loader())
        again = ByStep()
        resumed = trainer(hsdp(outer=OUTER), max_steps=11)
        resumed.fit(again, loader(), ckpt_path=folder / "step=6.ckpt")
        named = trainer("diloco_hsdp", max_steps=31)
        named.fit(Regression(), loader())
        refused = raised(lambda: trainer(LowBitFSDPStrategy(outer="diloco"), max_steps=1).fit(Regression(), loader()))
    return LocalSteps(
        whole=Run.of(whole.losses, whole, made.strategy.sync),
        again=Run.of(again.losses, again, resumed.strategy.sync),
        nbytes=named.strategy.sync.ranks.peers.sent_nbytes / 31,
        ring_nbytes=4 * 2 * 3 / 4 * sum(param.numel() for param in whole.parameters()),
        refused=refused,
    )


@scenarios(local_steps, world_size=4)
def test_local_steps_between_nodes(facts: list[LocalSteps]) -> None:
    for rank in facts:
        assert rank.again.bits == rank.whole.bits == facts[0].whole.bits
        assert rank.again.losses == rank.whole.losses[6:]
        assert (rank.whole.peers, rank.whole.world_size, rank.whole.steps) == (2, 4, 11)
        assert rank.nbytes < 0.01 * rank.ring_nbytes, (rank.nbytes, rank.ring_nbytes)
        assert "shard_size" in rank.refused


# -- checkpoints of Fabric ---------------------------------------------------------------------------------------------


def resumed_in_fabric(folder: Path) -> Facts:
    """Saved in the middle of a round, when replicas differ in weights and in their optimizers' state."""

    def run(first: int, last: int) -> tuple[list[float], list[float]]:
        made = launch(with_fabric.LowBitFSDPStrategy(shard_size=2, outer=OUTER))
        torch.manual_seed(0)
        net = mlp()
        model, optimizer = setup(made, net)
        state = {"model": model, "optimizer": optimizer}
        if first:
            made.load(folder / "middle", state)
        losses = train(made, model, optimizer, batches(dist.get_rank(), first, min(6, last)))
        if last == 6:
            made.save(folder / "middle", state)
        losses += train(made, model, optimizer, batches(dist.get_rank(), max(6, first), last))
        moments = [local(each["exp_avg_sq"]).sum().item() for each in optimizer.state.values()]
        sessions: Any = made.strategy
        sessions.sessions[0].finish()
        values = [local(param).sum().item() for param in net.parameters()]
        sessions.sessions[0].close()
        return losses, moments + values

    whole = run(0, 11)
    run(0, 6)
    again = run(6, 11)
    return {"losses": (whole[0][6:], again[0]), "rest": (whole[1], again[1])}


@scenarios(resumed_in_fabric, world_size=4)
def test_in_fabric_each_replica_goes_on_with_its_own_optimizer(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"][0] == rank["losses"][1]
        assert rank["rest"][0] == rank["rest"][1]
    moments = {rank["rest"][0][0] for rank in facts}
    assert len(moments) == 4  # also those of two ranks with the same shard


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


@pytest.mark.slow
@scenarios(
    validates_anchors,
    world_size=4,
    by=("trainer", "callback"),
    weights=("exact", "code8"),
)
def test_local_steps_are_the_same_with_and_without_validation(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank[True] == rank[False]
