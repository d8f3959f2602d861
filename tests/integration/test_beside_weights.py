"""What a model changes beside trained parameters while ranks train by themselves: averaged, or saved for each rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional as F

from lowbit_strategy import DiLoCo, DivergenceError, LocalSGD, LoCo, PostLocalSGD
from lowbit_strategy.lightning import LowBitDDPStrategy
from testing.log import listen
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.comparing import checksum
from testing.training.regression import OUTPUTS, WIDTH, ByStep, loader, mlp, trainer

RULES = {
    "localsgd": LocalSGD(every=4),
    "streaming": DiLoCo(every=6, momentum=0.5, fragments=3, delay=1, mix=0.5),
    "later": PostLocalSGD(every=3, synchronous=4),
}


class Distilled(ByStep):
    """A teacher follows the student, a buffer counts, and another one is averaged; the loss depends on all of them."""

    def __init__(self) -> None:
        super().__init__(mlp())
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.unchanged = torch.nn.Linear(WIDTH, OUTPUTS).requires_grad_(False)
        self.register_buffer("center", torch.zeros(OUTPUTS))
        self.register_buffer("used", torch.zeros(OUTPUTS, dtype=torch.long))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        for teacher, student in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.data.lerp_(student.data, 0.2)  # which raises no version counter
        out = self.net(x)
        self.center.lerp_(out.detach().mean(0), 0.1)
        self.used += (out.detach() > 0.2).sum(0)
        aim = self.teacher(x) + self.unchanged(x) + self.center + 0.01 * self.used
        return F.mse_loss(out, y) + 0.5 * F.mse_loss(out, aim)

    def facts(self) -> tuple[int, ...]:
        return tuple(
            checksum(each) for each in (self.net.parameters(), self.teacher.parameters(), [self.center], [self.used])
        )


def _fit(rule: str, steps: int, checkpoint: Path | None = None, **options: Any) -> tuple[Distilled, Any]:
    torch.manual_seed(0)
    model = Distilled()
    made = trainer(LowBitDDPStrategy(LoCo(block_size=32), outer=RULES[rule]), max_steps=steps, **options)
    made.fit(model, loader(), ckpt_path=checkpoint)
    return model, made


def distilling(folder: Path, rule: str) -> Facts:
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    with listen() as logged:
        whole, made = _fit(rule, 14, enable_checkpointing=True, callbacks=[saver])
    same = []
    for step in (2, 7, 9):
        model, _ = _fit(rule, 14, folder / f"step={step}.ckpt")
        same.append(model.facts() == whole.facts() and model.losses == whole.losses[step:])
    return {
        "same": same,
        "facts": whole.facts(),
        "averaged": sorted(made.strategy.sync.rounds.model.buffers.shared),
        "said": sum("used differ between ranks and have no mean" in text for text in logged),
    }


@scenarios(distilling, rule=tuple(RULES), slow=all_but(rule=("localsgd", "streaming")))
def test_it_is_averaged_or_saved_for_each_rank(facts: list[Facts]) -> None:
    first, second = facts
    assert first["same"] == second["same"] == [True] * 3
    assert first["facts"][:3] == second["facts"][:3]
    assert first["facts"][3] != second["facts"][3]
    assert (first["said"], second["said"]) == (1, 0)
    teacher = [f"teacher.{layer}.{part}" for layer in (0, 2, 4) for part in ("bias", "weight")]
    assert first["averaged"] == ["center", *teacher]


def diverging(folder: Path) -> Facts:
    """Code that changes what ranks share on one of them."""

    class Diverging(Distilled):
        def on_train_batch_end(self, *args: Any) -> None:
            outer = self.trainer.strategy.sync.rounds
            outer.model.buffers.shared["center"][0] = float(self.global_rank)

    made = trainer(LowBitDDPStrategy(LoCo(block_size=32), outer=LocalSGD(every=2)), max_steps=8)
    try:
        made.fit(Diverging(), loader())
    except DivergenceError as error:
        return {"error": str(error)}
    return {"error": None}


@scenarios(diverging)
def test_averaged_buffers_are_compared(facts: list[Facts]) -> None:
    assert all("center differs between rank 0; rank 1" in rank["error"] for rank in facts)
