"""Replicas that come and go under Accelerate, the HF Trainer and Fabric, each a world of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.accelerate import LowBitPlugin, binding_of
from lowbit_strategy.fabric import LowBitDDPStrategy
from lowbit_strategy.transformers import attach
from testing.processes.ranks import run_ranks
from testing.processes.replicas import Replicas
from testing.processes.scripts import REPOSITORY, run_script
from testing.training.accelerated import fresh_state, make, prepared
from testing.training.comparing import fingerprint
from testing.training.regression import dataset, mlp

RULE = DiLoCo(every=5, momentum=0.5)


def plugin(elastic: Elastic | None) -> LowBitPlugin:
    return LowBitPlugin(LoCo(block_size=32, beta=0.0, reset_steps=None), outer=RULE, elastic=elastic)


def train(elastic: Elastic | None, rank: int, steps: int) -> dict[str, Any]:
    """A loop whose data depends on the step and on the replica, as if replicas were ranks of one world."""
    fresh_state()
    accelerator = Accelerator(cpu=True)
    plugin(elastic).attach(accelerator)
    torch.manual_seed(0 if elastic is None else rank)
    model = mlp()
    if elastic is None:
        torch.manual_seed(0)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for step in range(steps):
        at = (step * 2 + rank) * 4 % 96
        x, y = dataset()[at : at + 4]
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    binding = binding_of(accelerator)
    assert binding is not None
    assert binding.sync is not None
    sent = binding.sync.ranks.peers.sent_nbytes
    accelerator.end_training()
    return {"losses": losses, "print": fingerprint(accelerator.unwrap_model(model)), "sent": sent}


def train_as_rank(rank: int, world_size: int, steps: int) -> dict[str, Any]:
    return train(None, rank, steps)


def test_members_that_stay_train_as_ranks_of_one_world(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        run.start("a", train, 0, 22)
        run.start("b", train, 1, 22)
        without = run_ranks(train_as_rank, 2, 22, process_group=None)
        replicas = run.results("a", "b")
    assert [replicas["a"], replicas["b"]] == without


def test_a_loader_gives_every_replica_other_samples(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "ab":
            run.start(name, train_from_loader)
        seen = run.results("a", "b")
    assert len(seen["a"]) == len(seen["b"]) == 48
    assert not set(seen["a"]) & set(seen["b"])


def train_from_loader(elastic: Elastic) -> list[int]:
    fresh_state()
    torch.manual_seed(0)  # the same on all replicas
    accelerator = Accelerator(cpu=True)
    plugin(elastic).attach(accelerator)
    model = mlp()
    samples = list(zip(*dataset(96).tensors, range(96), strict=True))
    loader, model, optimizer = accelerator.prepare(
        DataLoader(samples, batch_size=4, shuffle=True), model, torch.optim.Adam(model.parameters())
    )
    seen: list[int] = []
    for x, y, index in loader:
        seen += index.tolist()
        accelerator.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if len(seen) == 48:
            break
    accelerator.end_training()
    return seen


def train_in_fabric(elastic: Elastic, seed: int) -> int:
    """Nothing but Fabric's own calls; replicas begin with weights that differ."""
    torch.manual_seed(seed)
    fabric = Fabric(accelerator="cpu", devices=1, strategy=LowBitDDPStrategy(LoCo(), outer=RULE, elastic=elastic))
    fabric.launch()
    net = mlp()
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    for step in range(15):
        x, y = dataset()[4 * step : 4 * step + 4]
        fabric.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint(net)


def test_fabric_s_replicas_meet_before_the_first_forward_pass(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for seed, name in enumerate("ab"):
            run.start(name, train_in_fabric, seed)
        results = run.results("a", "b")
    assert results["a"] == results["b"]  # at the end of a round


def _refused(rank: int, world_size: int) -> str:
    fresh_state()
    options = LowBitPlugin(shard_size="node", outer=RULE, elastic=Elastic(lighthouse="http://127.0.0.1:1"))
    with pytest.raises(ValueError) as error:  # noqa: PT011
        prepared(make("fsdp", options))
    return str(error.value)


def test_accelerate_refuses_nodes_of_several_ranks() -> None:
    errors = run_ranks(_refused, 2, process_group=None)
    assert all("elastic serves replicas of one process each under Accelerate" in error for error in errors)


class StepsNoted(TrainerCallback):
    """Writes down the step for the test, which kills by it."""

    def __init__(self, path: Path, dies_at: int | None) -> None:
        self.path, self.dies_at = path, dies_at
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        self.path.write_text(str(state.global_step))
        time.sleep(0.03)
        if state.global_step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


class Noted(LlamaForCausalLM):
    """It keeps what it has seen in training."""

    def forward(self, input_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        if self.training:
            self.seen = [*getattr(self, "seen", []), *input_ids[:, 0].tolist()]
        return super().forward(input_ids=input_ids, labels=labels, **given)


def fit(elastic: Elastic, folder: Path, dies_at: int | None = None, resume: str | None = None) -> dict[str, Any]:
    assert elastic.name is not None
    fresh_state()
    set_seed(ord(elastic.name))
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    rows = (torch.arange(960)[:, None] + torch.arange(8)) % 1024  # the first token is the sample's number
    args = TrainingArguments(
        str(folder / elastic.name),
        max_steps=50 if resume is None else 60,
        use_cpu=True,
        per_device_train_batch_size=4,
        save_steps=10,
        logging_steps=10,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        disable_tqdm=True,
        report_to="none",
    )
    steps_noted = StepsNoted(folder / f"{elastic.name}.steps", dies_at)
    model = Noted(config)
    made = Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[steps_noted]
    )
    attach(made, plugin(elastic))
    made.train(resume_from_checkpoint=resume)
    assert made.lr_scheduler is not None
    return {
        "print": fingerprint(model),
        "steps": steps_noted.steps,
        "seen": model.seen,
        "schedule": made.lr_scheduler.last_epoch,
        "saved": sorted(path.name for path in (folder / elastic.name).glob("checkpoint-*")),
        "last": made.state.global_step,
    }


def step_of(folder: Path, name: str) -> int:
    path = folder / f"{name}.steps"
    return int(path.read_text() or 0) if path.exists() else 0


def test_a_trainer_is_lost_and_another_comes_into_the_others_step(tmp_path: Path) -> None:
    with Replicas(tmp_path) as run:
        for name in "abc":
            run.start(name, fit, tmp_path, 12 if name == "b" else None, held=True)
        run.release("a", "b")
        run.wait_for(lambda: step_of(tmp_path, "b") >= 9, "nine steps")
        run.release("c")
        results = run.results("a", "c")
        a, c = results["a"], results["c"]
        assert a["print"] == c["print"]
        assert a["last"] == c["last"] == a["steps"][-1] == c["steps"][-1] == 50
        assert c["steps"][0] > 9  # and not 1
        assert a["schedule"] == c["schedule"] == 50
        together = c["steps"][0]
        assert not set(a["seen"][4 * together :]) & set(c["seen"])
        assert a["saved"] == [f"checkpoint-{step}" for step in (10, 20, 30, 40, 50)]
        assert c["saved"] == []  # the lowest one writes
    with Replicas(tmp_path / "again") as run:
        for name in "ac":
            run.start(name, fit, tmp_path / "again", resume=str(tmp_path / "a" / "checkpoint-40"))
        resumed = run.results("a", "c")
    assert resumed["a"]["print"] == resumed["c"]["print"]
    assert resumed["a"]["steps"][0] == 41
    assert resumed["a"]["schedule"] == 60


SCRIPT = REPOSITORY / "tests" / "integration" / "scripts" / "replica.py"
LAUNCH = ["-c", "from lowbit_strategy.cli import main; main()", "launch"]


def test_launched_with_a_section(tmp_path: Path) -> None:
    """`lowbit launch` as on two machines, of a script that knows nothing of replicas."""
    with Replicas(tmp_path) as run:

        def launch(name: str) -> dict[str, Any]:
            elastic = {"lighthouse": run.elastic(name).lighthouse, "name": name, "min_replicas": 2}
            section = {"compressor": "loco", "outer": {"name": "diloco", "every": 5}, "elastic": elastic}
            job, out = tmp_path / f"{name}.yaml", tmp_path / f"{name}.json"
            job.write_text(
                yaml.safe_dump(
                    {"distributed_type": "NO", "num_processes": 1, "use_cpu": True, "lowbit_config": section}
                )
            )
            done = run_script([*LAUNCH, "--config_file", job, SCRIPT, "--out", out], timeout=200)
            assert "2 replicas (a, b)" in done.stderr
            facts: dict[str, Any] = json.loads(out.read_text())
            return facts

        with ThreadPoolExecutor() as machines:
            a, b = machines.map(launch, "ab")
    assert a["total"] == b["total"]
    assert not set(a["seen"]) & set(b["seen"])
    assert a["type"] == "Sequential"  # as Accelerate leaves it
