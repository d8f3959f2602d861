"""The package chooses under Accelerate, the HF Trainer and Fabric, as a section of a configuration asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lowbit_strategy import Auto
from lowbit_strategy.config_file.section import plugin_from_section
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.accelerated import Kind, make, prepared, record_of
from testing.training.accelerated import train as accelerated
from testing.training.auto import STEPS, is_hooked, settled
from testing.training.comparing import fingerprint
from testing.training.fabric import launch, setup
from testing.training.fabric import train as fabric
from testing.training.hf_trainer import trainer as hf_trainer
from testing.training.regression import dataset, mlp


def chosen_and_declined(folder: Path, kind: Kind) -> Facts:
    found: Facts = {}
    for name, choose in (("chosen", 0), ("declined", None)):
        with settled(choose, tries=1):
            plugin = plugin_from_section({"compressor": "auto", "quality": "close"})
            job = prepared(make(kind, plugin), num_samples=16 * STEPS)
            accelerated(job, STEPS)
        found[name] = {"losses": job.losses, "hook": is_hooked(job.model), "steps": job.sync.step_index}
        found[name] |= {"bits": fingerprint(job.model), "record": record_of(job.model)}
    return found


@scenarios(chosen_and_declined, kind=("ddp", "fsdp"), slow=all_but(kind="ddp"))
def test_accelerate(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["chosen"]["hook"]
        assert not rank["declined"]["hook"]
        assert rank["chosen"]["steps"] == rank["declined"]["steps"] == STEPS
        assert rank["chosen"]["bits"] == facts[0]["chosen"]["bits"]
        torch.testing.assert_close(rank["chosen"]["losses"], rank["declined"]["losses"], rtol=0.02, atol=0.02)


def under_the_trainer(folder: Path) -> Facts:
    with settled(0, tries=1):
        trained = hf_trainer(folder, "ddp", "auto", max_steps=STEPS)
        trained.train()
    session: Any = trained.accelerator.lowbit.sessions[0]
    return {"phase": session.pace.phase, "name": session.pace.active.name, "bits": fingerprint(trained.model)}


@scenarios(under_the_trainer)
def test_trainer_of_hugging_face(facts: list[Facts]) -> None:
    for rank in facts:
        assert (rank["phase"], rank["name"]) == ("settled", "number 0")
        assert rank["bits"] == facts[0]["bits"]


def under_fabric(folder: Path, name: str) -> Facts:
    made = launch(name)
    torch.manual_seed(0)
    data = dataset(4 * 2 * STEPS)
    own = [data[4 * (2 * step + made.global_rank) : 4 * (2 * step + made.global_rank + 1)] for step in range(STEPS)]
    with settled(0):
        model, optimizer = setup(made, mlp())
        losses = fabric(made, model, optimizer, own)
    strategy: Any = made.strategy
    session = strategy.sessions[0]
    return {
        "name": session.pace.active.name,
        "auto": strategy.compressor,
        "losses": losses,
        "bits": fingerprint(model),
    }


@scenarios(under_fabric, name=("lowbit_ddp", "lowbit_fsdp"))
def test_fabric(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["name"] == "number 0"
        assert rank["auto"] == Auto()
        assert rank["bits"] == facts[0]["bits"]
