"""Local steps when something goes wrong: values that are not finite, and resuming under other options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowbit_strategy import DiLoCo, LoCo, SparseLoCo
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.ranks import run_ranks
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.comparing import fingerprint, full
from testing.training.regression import MIN_SHARD_NUMEL, ByStep, Regression, loader, mlp, trainer

STREAMING = DiLoCo(every=6, momentum=0.5, fragments=3, delay=1, mix=0.5)
RULES = {"diloco": DiLoCo(every=4, momentum=0.5), "streaming": STREAMING, "sparseloco": SparseLoCo(every=4)}


def ddp(rule: Any) -> LowBitDDPStrategy:
    return LowBitDDPStrategy(LoCo(block_size=32, beta=0.0, reset_steps=None), outer=rule)


def hsdp(rule: Any, **options: Any) -> LowBitFSDPStrategy:
    given: dict[str, Any] = {"shard_size": "node", "min_shard_numel": MIN_SHARD_NUMEL} | options
    return LowBitFSDPStrategy(LoCo(block_size=32, beta=0.0, reset_steps=None), outer=rule, **given)


def saver(folder: Path, every: int = 1) -> dict[str, Any]:
    each = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1, filename="{step}")
    return {"enable_checkpointing": True, "callbacks": [each]}


class Masked(ByStep):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))


def masked(folder: Path) -> Facts:
    whole, again = Masked(), Masked()
    trainer(ddp(RULES["diloco"]), max_steps=9, **saver(folder)).fit(whole, loader())
    trainer(ddp(RULES["diloco"]), max_steps=9).fit(again, loader(), ckpt_path=folder / "step=6.ckpt")
    return {"same": fingerprint(whole) == fingerprint(again), "mask": bool(torch.isinf(again.mask).sum() == 6)}


@scenarios(masked)
def test_a_mask_of_minus_infinity_is_no_obstacle_to_resuming(facts: list[Facts]) -> None:
    assert facts == [{"same": True, "mask": True}] * 2


class Explodes(ByStep):
    """One rank's loss is NaN once, or all ranks' are, with statistics of a BatchNorm on the way."""

    def __init__(self, ranks: tuple[int, ...] = (1,)) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8)))
        self.ranks = ranks

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        bad = self.training and self.global_step == 6 and self.global_rank in self.ranks
        return super().loss((x * float("nan") if bad else x, y))


def not_finite(folder: Path, rule: str) -> Facts:
    whole, again = Explodes(), Explodes()
    with listen() as lines:
        trainer(ddp(RULES[rule]), max_steps=24, **saver(folder)).fit(whole, loader())
    trainer(ddp(RULES[rule]), max_steps=24).fit(again, loader(), ckpt_path=folder / "step=7.ckpt")
    return {
        "print": fingerprint(whole),
        "finite": all(bool(each.isfinite().all()) for each in (*whole.parameters(), *whole.buffers())),
        "losses": whole.losses,
        "resumed": fingerprint(again),
        "lines": [line for line in lines if "not finite" in line],
    }


@scenarios(not_finite, rule=tuple(RULES), slow=all_but(rule="streaming"))
def test_a_rank_whose_weights_are_not_finite_is_left_out_of_its_turn(facts: list[Facts]) -> None:
    first, second = facts
    assert first["print"] == second["print"] == first["resumed"] == second["resumed"]
    assert first["finite"]
    assert all(loss == loss for loss in first["losses"])
    assert any(loss != loss for loss in second["losses"])
    assert second["losses"][-1] < second["losses"][0]
    assert len(first["lines"]) == 1
    assert "on rank 1: the others continue without them" in first["lines"][0]


def all_not_finite(folder: Path) -> Facts:
    model = Explodes((0, 1))
    with listen() as lines:
        trainer(ddp(RULES["diloco"]), max_steps=24).fit(model, loader())
    return {"print": fingerprint(model), "losses": model.losses, "lines": [line for line in lines if "finite" in line]}


@scenarios(all_not_finite)
def test_where_no_rank_is_finite_the_anchors_stay(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    assert facts[0]["losses"][-1] < facts[0]["losses"][0]
    assert "on rank 0, rank 1: the anchors stay as they are" in facts[0]["lines"][0]


def seldom(folder: Path, every: int) -> Facts:
    """Validation after every epoch of 12 steps."""
    with listen() as lines:
        made = trainer(ddp(DiLoCo(every=every)), max_steps=-1, max_epochs=3)
        made.fit(Regression(), loader(), loader(16))
    return {"lines": [line for line in lines if "this validation sees the weights of optimizer step" in line]}


@scenarios(seldom, every=(10, 20))
def test_validation_before_a_turn_is_warned_of(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    every = dict(request.node.callspec.params["facts"].arguments)["every"]
    assert len(facts[0]["lines"]) == (every == 20)
    assert facts[1]["lines"] == []
    if every == 20:
        assert "step 0: the ranks have since trained 12 steps" in facts[0]["lines"][0]


class FirstWeights(Callback):
    """What the model and the outer optimizer start from, whole."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.anchors: dict[str, Tensor] = {}
        self.momenta: dict[str, Tensor] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if not self.weights:
            self.look(trainer, pl_module)

    def look(self, trainer: Any, pl_module: Any) -> None:
        outer = trainer.strategy.sync.rounds
        kept = outer._optimizer.state_dict()
        for name, param in pl_module.named_parameters():
            anchor = outer.anchors[name]
            self.weights[name] = full(param).clone()  # of a mesh of one rank it is the shard itself
            self.anchors[name] = _whole(anchor, param)
            if "momentum_buffer" in kept[name]:
                self.momenta[name] = _whole(kept[name]["momentum_buffer"], param)


def _whole(shard: Tensor, param: Tensor) -> Tensor:
    if not isinstance(param, DTensor):
        return shard.clone()
    made = DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    return made.full_tensor().clone()


class OuterAdam(DiLoCo):
    """A rule of the user's own."""

    def optimizer(self, anchors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(anchors, lr=self.lr)


CHANGED = {
    "fewer": DiLoCo(every=6, momentum=0.5, fragments=2, delay=1, mix=0.5),
    "one": DiLoCo(every=6, momentum=0.5),
    "adam": OuterAdam(every=6, lr=1e-2, fragments=3, delay=1, mix=0.5),
}


def changed_rule(folder: Path, to: str) -> Facts:
    """Saved while a fragment is under way."""
    trainer(ddp(STREAMING), max_steps=9, **saver(folder)).fit(ByStep(), loader())
    first, model = FirstWeights(), ByStep()
    with listen() as lines:
        made = trainer(ddp(CHANGED[to]), max_steps=20, callbacks=[first])
        made.fit(model, loader(), ckpt_path=folder / "step=8.ckpt")
    saved = torch.load(folder / "step=8.ckpt", weights_only=True)["state_dict"]
    return {
        "anchors": all(torch.equal(first.weights[name], saved[name]) for name in first.weights),
        "momenta": len(first.momenta),
        "print": fingerprint(model),
        "steps": made.strategy.sync.step_index,
        "lines": [line for line in lines if "different outer rule" in line],
    }


@scenarios(changed_rule, to=tuple(CHANGED))
def test_another_rule_goes_on_from_the_anchors(facts: list[Facts]) -> None:
    assert facts[0]["print"] == facts[1]["print"]
    for rank in facts:
        assert rank["anchors"]
        assert rank["steps"] == 20
        assert rank["momenta"] in (0, 6)
    assert len(facts[0]["lines"]) == 1
    assert ("its class has changed" in facts[0]["lines"][0]) == (facts[0]["momenta"] == 0)


RULE = DiLoCo(every=3, momentum=0.5, fragments=2, delay=1)


def grouped(folder: Path) -> None:
    """Two nodes of two ranks. After step 7 nothing is under way, after step 8 one of two fragments is."""
    with nodes_of(2):
        trainer(hsdp(RULE), max_steps=8, **saver(folder)).fit(Regression(mlp()), loader())


def regrouped(folder: Path, source: Path, step: int, policy: str) -> Facts:
    """Each rank is a node of its own now."""
    first, model = FirstWeights(), Regression(mlp())
    path = source / f"step={step}.ckpt"
    made = trainer(hsdp(RULE, shard_size=1, on_world_size_change=policy), max_steps=20, callbacks=[first])
    made.fit(model, loader(), ckpt_path=path)
    saved = torch.load(path, weights_only=True)["state_dict"]
    files = [torch.load(each, weights_only=True) for each in sorted(Path(f"{path}.lowbit").iterdir())[:2]]
    kept = [each["own"]["outer"]["outer"]["optimizer"] for each in files]
    momenta = {name: torch.cat([each[name]["momentum_buffer"] for each in kept]) for name in first.momenta}
    return {
        "same weights": sum(torch.equal(first.weights[name], saved[name]) for name in saved),
        "anchors": all(torch.equal(first.weights[name], first.anchors[name]) for name in saved),
        "same momenta": sum(torch.equal(momenta[name], first.momenta[name]) for name in momenta),
        "print": fingerprint(model),
        "replicas": made.strategy.sync.ranks.peers.world_size,
    }


def other_nodes(folder: Path, step: int, policy: str) -> Facts:
    grouped(folder)
    return regrouped(folder, folder, step, policy)


def check_regrouped(facts: list[Facts], step: int) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert rank["anchors"]
        assert rank["replicas"] == len(facts)
        if step == 7:
            assert rank["same weights"] == rank["same momenta"] == 6
        else:  # the fragment that was under way has landed
            assert 0 < rank["same weights"] == rank["same momenta"] < 6


@pytest.mark.slow
@scenarios(other_nodes, world_size=4, step=(7, 8), policy=("reset", "fold"))
def test_local_steps_go_on_with_another_number_of_ranks_per_node(
    facts: list[Facts], request: pytest.FixtureRequest
) -> None:
    check_regrouped(facts, dict(request.node.callspec.params["facts"].arguments)["step"])


def _grouped(rank: int, world_size: int, folder: Path) -> None:
    grouped(folder)


def _regrouped(rank: int, world_size: int, folder: Path, step: int) -> Facts:
    return regrouped(folder, folder, step, "fold")


@pytest.mark.slow
@pytest.mark.parametrize("step", [7, 8])
def test_local_steps_go_on_with_fewer_ranks(tmp_path: Path, step: int) -> None:
    run_ranks(_grouped, 4, tmp_path)
    check_regrouped(run_ranks(_regrouped, 2, tmp_path, step), step)
