"""Local steps through Fabric, Accelerate, a loop of one's own and the HF Trainer: each goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from lowbit_strategy import DiLoCo, LoCo, Quadratic
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.custom_loop import SyncOptions, attach_ddp, prepare
from lowbit_strategy.fabric import LowBitDDPStrategy as FabricDDPStrategy
from testing.processes.scenarios import Facts, scenarios
from testing.training import accelerated
from testing.training.comparing import fingerprint
from testing.training.fabric import batches, launch, setup, train
from testing.training.hf_trainer import trainer as hf_trainer
from testing.training.regression import mlp

RULE = DiLoCo(every=6, momentum=0.5, fragments=3, delay=1, mix=0.5)


def through_fabric(folder: Path) -> Facts:
    facts: Facts = {}
    for name in ("whole", "again"):
        torch.manual_seed(0)
        made = launch(FabricDDPStrategy(LoCo(block_size=32), outer=RULE))
        net = mlp()
        model, optimizer = setup(made, net)
        state = {"model": model, "optimizer": optimizer}
        path = folder / "fabric.ckpt"
        if name == "again":
            made.load(path, state)
        else:
            train(made, model, optimizer, batches(made.global_rank, 0, 5))
            made.save(path, state)
        train(made, model, optimizer, batches(made.global_rank, 5, 11))
        session = made.strategy.sessions[0]
        with session.shared_weights():
            shared = fingerprint(net)
        session.finish()
        facts[name] = {"shared": shared, "end": fingerprint(net)}
    saved = torch.load(path, weights_only=True)["model"]
    return facts | {"saved": float(sum(value.sum() for value in saved.values()))}


@scenarios(through_fabric)
def test_fabric_saves_the_anchors_and_goes_on_to_the_bit(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["whole"] == facts[0]["again"]


def through_accelerate(folder: Path) -> Facts:
    """Saved in the middle of a round and of a fragment's way; what is saved is what all ranks share."""
    plugin = LowBitPlugin(LoCo(block_size=32), outer={"name": "diloco", "every": 6, "fragments": 2, "delay": 2})
    whole = accelerated.prepared(accelerated.make("ddp", plugin, accumulate=2), lr=1e-2)
    accelerated.train(whole, 8, clip=1.0)
    whole.accelerator.save_state(str(folder))
    accelerated.train(whole, 14, skip=8, clip=1.0)
    again = accelerated.prepared(accelerated.make("ddp", plugin, accumulate=2), lr=1e-2)
    again.accelerator.load_state(str(folder))
    accelerated.train(again, 14, skip=8, clip=1.0)
    before, resumed = fingerprint(whole.model), fingerprint(again.model)
    shared = whole.accelerator.get_state_dict(whole.model)
    own = fingerprint(whole.model)
    whole.accelerator.end_training()
    return {
        "own": before,
        "resumed": resumed,
        "kept": own == before,
        "shared": float(sum(value.double().sum() for value in shared.values())),
        "end": fingerprint(whole.model),
        "steps": whole.sync.step_index,
    }


@scenarios(through_accelerate)
def test_accelerate_goes_on_to_the_bit(facts: list[Facts]) -> None:
    first, second = facts
    assert first["own"] == first["resumed"] != second["own"] == second["resumed"]
    assert first["kept"]
    assert first["shared"] == second["shared"]
    assert first["end"] == second["end"]
    assert first["steps"] == 7


def one_of_two(folder: Path) -> Facts:
    """In rounds the state of one model is asked for, however the model is wrapped; the other one goes on as it was."""
    accelerator = accelerated.make("ddp", LowBitPlugin(LoCo(block_size=32), outer=DiLoCo(every=9)))
    nets = [mlp() for _ in range(2)]
    models = [accelerator.prepare(net) for net in nets]
    for model, net in zip(models, nets, strict=True):
        optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = batches(accelerator.process_index, 0, 1)[0]
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
    own = [fingerprint(net) for net in nets]
    seen: list[float] = []
    nets[1].register_state_dict_pre_hook(lambda *_: seen.append(fingerprint(nets[0])))
    states = [accelerator.get_state_dict(models[1]), accelerator.get_state_dict(model=nets[1], unwrap=False)]
    return {
        "own": own,
        "others": seen,
        "shared": [float(sum(value.double().sum() for value in state.values())) for state in states],
    }


@scenarios(one_of_two)
def test_accelerate_shares_the_weights_of_the_model_that_is_asked_for(facts: list[Facts]) -> None:
    first, second = facts
    for rank in facts:
        assert rank["others"] == rank["own"][:1] * 2
        assert rank["own"][1] not in rank["shared"]
    assert first["shared"] == second["shared"] == first["shared"][:1] * 2


def loop_of_ones_own(folder: Path) -> Facts:
    """Nobody names the optimizer, whose rate decides of a round's length, but `end_step`, which may leave it out."""
    rule = DiLoCo(every=Quadratic(alpha=0.018, minimum=2))  # the first round has 2 steps, the others 3
    steps = []
    for names_it in (True, False):
        torch.manual_seed(0)
        net = mlp()
        prepared = prepare(net, LoCo(block_size=32, beta=0.0, reset_steps=None), SyncOptions(outer=rule))
        model = DistributedDataParallel(net)
        session = attach_ddp(model, prepared)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        session.resume()
        for x, y in batches(torch.distributed.get_rank(), 0, 8):
            optimizer.zero_grad()
            session.begin_step()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            session.end_step(optimizer if names_it else None)
            steps.append(fingerprint(net))
        session.close()
    return {"steps": steps}


@scenarios(loop_of_ones_own)
def test_a_loop_of_ones_own_may_name_its_optimizer_at_each_step(facts: list[Facts]) -> None:
    first, second = facts
    same = [a == b for a, b in zip(first["steps"], second["steps"], strict=True)]
    assert same == [False, True, False, False, True, False, False, True] * 2
    assert first["steps"][:8] == first["steps"][8:]


class EvaluateInTheMiddle(TrainerCallback):
    """On the same data on all ranks, between two rounds."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self._trainer.evaluate(self._trainer.train_dataset)


def through_the_hf_trainer(folder: Path) -> Facts:
    plugin = LowBitPlugin(LoCo(block_size=32), outer=DiLoCo(every=3))
    whole = hf_trainer(folder / "a", "ddp", plugin)
    whole.add_callback(EvaluateInTheMiddle(whole))
    whole.train()
    again = hf_trainer(folder / "b", "ddp", plugin)
    again.train(resume_from_checkpoint=str(folder / "a" / "checkpoint-4"))
    evaluated = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    return {"whole": fingerprint(whole.model), "again": fingerprint(again.model), "evaluated": evaluated}


@scenarios(through_the_hf_trainer)
def test_the_hf_trainer_goes_on_to_the_bit(facts: list[Facts]) -> None:
    assert facts[0] == facts[1]
    assert facts[0]["whole"] == facts[0]["again"]
    assert len(facts[0]["evaluated"]) == 1
