"""Replicas that come and go under the HF Trainer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

pytest.importorskip("torchft", reason="the extra elastic is not installed")

from lowbit_strategy import DiLoCo, Elastic, LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.ranks.topology import ShardSize
from lowbit_strategy.transformers import attach
from testing.processes.replicas import Replicas, ranks_of
from testing.training.accelerated import fresh_state
from testing.training.comparing import fingerprint

RULE = DiLoCo(every=5, momentum=0.5)


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


def fit(
    elastic: Elastic, folder: Path, num_ranks: int, dies_at: int | None = None, resume: str | None = None
) -> dict[str, Any]:
    """Train. `dies_at`: the step after which the replica's last rank is killed."""
    assert elastic.name is not None
    rank = int(os.environ.get("RANK", "0"))
    key = ranks_of(elastic.name, num_ranks)[rank]
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
        **({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}} if num_ranks > 1 else {}),
    )
    steps_noted = StepsNoted(folder / f"{key}.steps", dies_at if rank == num_ranks - 1 else None)
    model = Noted(config)
    made = Trainer(
        model, args, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[steps_noted]
    )
    compressor = LoCo(block_size=32, beta=0.0, reset_steps=None)
    shard_size: ShardSize | None = "node" if num_ranks > 1 else None
    attach(made, LowBitPlugin(compressor, outer=RULE, elastic=elastic, shard_size=shard_size))
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


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_is_lost_and_another_comes_into_the_others_step(tmp_path: Path, num_ranks: int) -> None:
    """Replicas of one process each, or nodes whose ranks share one model."""

    def nodes(names: str) -> list[str]:
        return [key for name in names for key in ranks_of(name, num_ranks)]

    with Replicas(tmp_path) as run:
        for name in "abc":
            dies_at = 12 if name == "b" else None
            run.start(name, fit, tmp_path, num_ranks, dies_at, held=True, num_ranks=num_ranks)
        run.release(*nodes("ab"))
        run.wait_for(lambda: step_of(tmp_path, "b") >= 9, "nine steps")
        run.release(*nodes("c"))
        results = run.results(*nodes("ac"))
        a, c = results["a"], results["c"]
        assert len({result["print"] for result in results.values()}) == 1
        assert a["last"] == c["last"] == a["steps"][-1] == c["steps"][-1] == 50
        assert c["steps"][0] > 9  # and not 1
        assert a["schedule"] == c["schedule"] == 50
        together = c["steps"][0]
        of_a = [index for key in nodes("a") for index in results[key]["seen"][4 * together :]]
        of_c = [index for key in nodes("c") for index in results[key]["seen"]]
        assert len({*of_a, *of_c}) == len(of_a) + len(of_c)
        assert a["saved"] == [f"checkpoint-{step}" for step in (10, 20, 30, 40, 50)]
        assert c["saved"] == []  # the lowest one writes
    with Replicas(tmp_path / "again") as run:
        for name in "ac":
            saved = str(tmp_path / "a" / "checkpoint-40")
            run.start(name, fit, tmp_path / "again", num_ranks, resume=saved, num_ranks=num_ranks)
        resumed = run.results(*nodes("ac"))
    assert len({result["print"] for result in resumed.values()}) == 1
    assert resumed["a"]["steps"][0] == 41
    assert resumed["a"]["schedule"] == 60
