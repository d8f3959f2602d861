"""Validation of local steps before the first turn is warned of, whatever the framework; checkpoints are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from lowbit_strategy import DiLoCo, LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.fabric import LowBitDDPStrategy as FabricDDPStrategy
from testing.log import listen
from testing.processes.scenarios import Facts, scenarios
from testing.training import accelerated
from testing.training.fabric import batches, launch, setup, train
from testing.training.hf_trainer import trainer as hf_trainer
from testing.training.regression import dataset, mlp


class Evaluates(TrainerCallback):
    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (2, 4, 8):
            self._trainer.evaluate(self._trainer.train_dataset)


def seldom(folder: Path, framework: str) -> Facts:
    """Validation twice before the first turn, then a checkpoint, then a turn and validation."""
    with listen() as lines:
        if framework == "hf":
            plugin = LowBitPlugin(LoCo(block_size=32), outer=DiLoCo(every=7))
            made = hf_trainer(folder, "ddp", plugin)
            made.add_callback(Evaluates(made))
            made.train()
        elif framework == "accelerate":
            plugin = LowBitPlugin(LoCo(block_size=32), outer=DiLoCo(every=7))
            job = accelerated.prepared(accelerated.make("ddp", plugin))
            for step in (2, 4, 8):
                accelerated.train(job, step, skip=len(job.losses))
                job.accelerator.get_state_dict(job.model)
                with job.accelerator.lowbit.shared_weights():
                    accelerated.validation_loss(job.model)
        else:
            made = launch(FabricDDPStrategy(LoCo(block_size=32), outer=DiLoCo(every=7)))
            model, optimizer = setup(made, mlp())
            for step in (2, 4, 8):
                train(made, model, optimizer, batches(made.global_rank, step - 2, step))
                made.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
                with made.strategy.sessions[0].shared_weights(), torch.no_grad():
                    model(dataset()[:4][0])
    return {"lines": [line for line in lines if "this validation sees the weights of optimizer step" in line]}


@scenarios(seldom, framework=("hf", "accelerate", "fabric"))
def test_validation_before_a_turn_is_warned_of_everywhere(facts: list[Facts]) -> None:
    assert len(facts[0]["lines"]) == 1
    assert "step 0: the ranks have since trained 2 steps" in facts[0]["lines"][0]
    assert facts[1]["lines"] == []


def only_saves(folder: Path) -> Facts:
    plugin = LowBitPlugin(LoCo(block_size=32), outer=DiLoCo(every=7))
    with listen() as lines:
        hf_trainer(folder, "ddp", plugin).train()
    return {"lines": [line for line in lines if "this validation sees" in line]}


@scenarios(only_saves)
def test_checkpoints_before_a_turn_are_no_validation(facts: list[Facts]) -> None:
    assert [rank["lines"] for rank in facts] == [[], []]
