"""The Hugging Face Trainer with a small random transformer, two real processes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from lowbit_strategy import LoCo
from lowbit_strategy.accelerate import LowBitPlugin, MonitorOptions, binding_of
from lowbit_strategy.control import Accordion, AccordionBatch, Controller, Phase, Schedule
from lowbit_strategy.telemetry.metric_names import is_of_group
from lowbit_strategy.transformers import attach
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.record import read_record
from testing.training.accelerated import Kind, record_of
from testing.training.comparing import fingerprint
from testing.training.hf_trainer import STEPS, losses, sequences, trainer

KINDS = ("ddp", "fsdp")


def facts_of(trained: Trainer) -> dict[str, Any]:
    binding = binding_of(trained.accelerator)
    assert binding is not None
    sync = binding.sync
    assert sync is not None
    model = trained.model_wrapped
    return {
        "losses": losses(trained),
        "record": record_of(model),
        "type": type(model).__name__,
        "steps": sync.step_index,
        "sent": sync.ranks.peers.sent_nbytes,
        "account": sum(sync.state.sent_nbytes(name) for name in sync.specs),
        "bits": fingerprint(trained.model),
        "unused": getattr(model, "find_unused_parameters", None),
    }


def compressed_and_not(folder: Path, kind: Kind) -> Facts:
    compressed = trainer(folder / "a", kind, LoCo(bits=4), gradient_accumulation_steps=2)
    compressed.train()
    plain = trainer(folder / "b", kind, gradient_accumulation_steps=2)
    plain.train()
    return facts_of(compressed) | {"plain": losses(plain)}


@scenarios(compressed_and_not, kind=KINDS, slow=all_but(kind="ddp"))
def test_training_ends_at_the_same_loss(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"][-1] == pytest.approx(rank["plain"][-1], rel=0.005)
        assert rank["losses"][-1] < rank["losses"][0] - 0.3
        assert rank["losses"] != rank["plain"]
        assert rank["steps"] == STEPS
        assert rank["sent"] == pytest.approx(STEPS * rank["account"], rel=0.01)
        if rank["type"] == "DistributedDataParallel":
            assert rank["unused"]  # the Trainer's own default
            assert "DDPHook.reduce" in rank["record"]
        else:
            assert rank["type"] == "FSDPLlamaForCausalLM"
            assert rank["record"] == "CompressedReduceScatter"
    assert facts[0]["bits"] == facts[1]["bits"]


def evaluated_first(folder: Path, how: str) -> Facts:
    """Accelerate alone returns a model that it has prepared for evaluation as it is, without DDP around it."""
    ways = {"compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"}, "bf16": {"bf16": True}}
    runs = []
    for early in (False, True):
        made = trainer(folder / str(early), "ddp", LoCo(bits=4), max_steps=3, **ways.get(how, {}))
        if early:
            made.evaluate(sequences()[:8])
        made.train()
        binding = binding_of(made.accelerator)
        assert binding is not None
        assert binding.sync is not None
        runs.append((losses(made), fingerprint(made.model), binding.sync.sent_nbytes))
    return {"runs": runs}


@scenarios(evaluated_first, how=("plain", "compiled", "bf16"), slow=all_but(how="plain"))
def test_an_evaluation_before_training_changes_nothing(facts: list[Facts]) -> None:
    for rank in facts:
        without, early = rank["runs"]
        assert early == without
        assert early[1:] == facts[0]["runs"][0][1:]


def resumed_from_a_checkpoint(folder: Path, kind: Kind) -> Facts:
    whole = trainer(folder, kind, LoCo(bits=4))
    whole.train()
    middle = str(folder / "checkpoint-4")
    parts = trainer(folder / "again", kind, LoCo(bits=4))
    parts.train(resume_from_checkpoint=middle)
    forgetful = trainer(folder / "forgetful", kind, LowBitPlugin(LoCo(bits=4), on_missing_residual="reset"))
    if whole.accelerator.is_main_process:
        shutil.rmtree(folder / "checkpoint-4/residuals.lowbit")
    whole.accelerator.wait_for_everyone()
    forgetful.train(resume_from_checkpoint=middle)
    torn = trainer(folder / "torn", kind, LowBitPlugin(LoCo(bits=4), on_missing_residual="error"))
    return {
        "losses": losses(parts) == losses(whole),
        "bits": fingerprint(parts.model) == fingerprint(whole.model),
        "matters": fingerprint(forgetful.model) != fingerprint(whole.model),
        "torn": raised(lambda: torn.train(resume_from_checkpoint=middle)),
        "marks": list(json.loads((folder / "checkpoint-4/trainer_state.json").read_text())["stateful_callbacks"]),
    }


@scenarios(resumed_from_a_checkpoint, kind=KINDS, slow=all_but(kind="ddp"))
def test_a_resumed_run_is_the_uninterrupted_one(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["losses"]
        assert rank["bits"]
        assert rank["matters"]  # without residuals it would not be
        assert "lowbit_strategy" in rank["marks"]
        assert "its residuals are missing" in rank["torn"]


EIGHT, TWO = LoCo(bits=8, block_size=32), LoCo(bits=2, block_size=32)
CONTROLLERS: dict[str, Controller] = {
    "steps": Accordion(  # the Trainer's learning rate falls steeply in a run this short
        light=EIGHT, heavy=TWO, interval=3, unit="steps", eta=100.0, learning_rate_drop=0.9
    ),
    "epochs": Schedule([Phase(compressor=EIGHT, unit="epoch"), Phase(compressor=TWO, start=1, unit="epoch")]),
    "fraction": Schedule([Phase(compressor=EIGHT), Phase(compressor=TWO, start=0.7, unit="fraction")]),
}


class Levels(TrainerCallback):
    """The heaviest level in force in every step."""

    def __init__(self, trainer: Trainer) -> None:
        self.binding = binding_of(trainer.accelerator)
        self.seen: list[int] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append(max(self.binding.driver.levels.values()))


def adapting(folder: Path, kind: Kind, controller: str) -> Facts:
    """Uninterrupted, then from its checkpoint, which is in the middle of a phase (at the end of the first epoch)."""
    plugin = LowBitPlugin(controller=CONTROLLERS[controller], monitor=MonitorOptions(every_n_steps=3))
    facts: Facts = {}
    for name, start in {"whole": None, "resumed": str(folder / "whole/checkpoint-4")}.items():
        run = trainer(folder / name, kind, plugin, report_to="tensorboard", per_device_train_batch_size=8)
        levels = Levels(run)
        run.add_callback(levels)
        run.train(resume_from_checkpoint=start)
        facts[name] = {
            "levels": levels.seen,
            "losses": losses(run),
            "bits": fingerprint(run.model),
            "logged": [entry for entry in run.state.log_history if "lowbit/relative_error" in entry],
            "shares": [entry["step"] for entry in run.state.log_history if "lowbit/share/level_0" in entry],
            "record": read_record(folder / name) if run.accelerator.is_main_process else [],
        }
    return facts | {"board": [path.name for path in folder.rglob("events*")]}


@scenarios(adapting, kind=KINDS, controller=tuple(CONTROLLERS), slow=all_but(kind="ddp", controller="epochs"))
def test_controllers_and_the_monitor(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    expected = {"steps": [0] * 6 + [1] * 2, "epochs": [0] * 4 + [1] * 4, "fraction": [0] * 6 + [1] * 2}
    for rank in facts:
        whole, resumed = rank["whole"], rank["resumed"]
        assert whole["levels"] == expected[request.node.callspec.id.rpartition("-")[2]]
        assert resumed["levels"] == whole["levels"][4:]
        assert resumed["losses"] == whole["losses"]  # the log comes back with the checkpoint
        assert resumed["bits"] == whole["bits"] == facts[0]["whole"]["bits"]
        assert [entry["step"] for entry in whole["logged"]] == [0, 3, 6]
        assert len(whole["shares"]) >= 2
        # The console shows what is in the Trainer's history: totals, and not dozens of figures of groups.
        assert not [name for entry in whole["logged"] for name in entry if "/" in name and is_of_group(name)]
    assert facts[0]["board"]
    record, again = facts[0]["whole"]["record"], facts[0]["resumed"]["record"]
    assert [line["step"] for line in record if line["kind"] == "observation"] == [0, 3, 6]
    assert (again[0]["kind"], again[0]["step"], again[0]["num_steps"]) == ("start", 4, STEPS)


class Tracker(TrainerCallback):
    """Takes everything that is logged, as integrations of trackers do."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.taken |= logs


def printing(folder: Path) -> Facts:
    """The Trainer without a progress bar prints a line with everything that is logged."""
    watched = trainer(folder, "ddp", LowBitPlugin(LoCo(bits=4), monitor=MonitorOptions(every_n_steps=4)))
    tracker = Tracker()
    watched.add_callback(tracker)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        watched.train()
    history = [entry for entry in watched.state.log_history if "lowbit/relative_error" in entry]
    return {"printed": printed.getvalue(), "tracked": tracker.taken, "history": history}


@scenarios(printing)
def test_groups_go_to_trackers_and_not_to_the_console(facts: list[Facts]) -> None:
    lead = facts[0]
    lines = [line for line in lead["printed"].splitlines() if "lowbit/relative_error" in line]
    assert len(lines) == len(lead["history"]) == STEPS // 4
    tracked = {name for name in lead["tracked"] if name.startswith("lowbit/")}
    groups = set(filter(is_of_group, tracked))
    assert any(name.startswith("lowbit/relative_error/") for name in groups)
    assert len(groups) > 20
    assert not any(name in lead["printed"] for name in groups)
    assert not any(name in entry for name in groups for entry in lead["history"])
    for totals in lead["history"]:
        ours = {name for name in totals if name.startswith("lowbit/")}
        assert ours == tracked - groups
        assert len(ours) < 10
        assert all(any(name in line for line in lines) for name in ours)


def trained_twice(folder: Path) -> Facts:
    """The Trainer frees Accelerate's memory when it begins, and goes on with the model that was wrapped before."""
    twice = trainer(folder, "ddp", LoCo(bits=4), save_total_limit=1)
    twice.train()
    once = facts_of(twice)
    # Checkpoints less than a second apart the Trainer orders by their step: it would delete the one it is writing.
    for path in folder.glob("checkpoint-*"):
        os.utime(path, (0, 0))
    twice.train()
    evaluation = twice.evaluate(sequences()[:8])
    return facts_of(twice) | {
        "once": once["sent"],
        "evaluation": evaluation["eval_loss"],
        "kept": sorted(path.name.rsplit("-", 2)[0] for path in folder.glob("checkpoint-*/residuals.lowbit/step*")),
    }


@scenarios(trained_twice)
def test_a_second_train_stays_compressed(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["steps"] == 2 * STEPS
        assert rank["sent"] == 2 * rank["once"]
        assert rank["kept"] == [f"step-{2 * STEPS}-rank-{rank}-of-2" for rank in range(2)]  # others are removed
    assert facts[0]["bits"] == facts[1]["bits"]
    assert facts[0]["evaluation"] == facts[1]["evaluation"]


def refused(folder: Path) -> Facts:
    made = trainer(folder / "a", "ddp", LoCo(bits=4))
    late = trainer(folder / "b", "ddp")
    late.train()
    return {
        "twice": raised(lambda: attach(made, LoCo())),
        "model": raised(lambda: attach(made.model, LoCo())),
        "late": raised(lambda: attach(late, LoCo())),
        "what": raised(lambda: attach(made, 4)),  # type: ignore[arg-type]
        "name": raised(lambda: attach(made, "lcoo")),
        "batch": raised(lambda: trainer(folder / "c", "ddp", LowBitPlugin(controller=AccordionBatch()))),
    }


@scenarios(refused)
def test_bad_input(facts: list[Facts]) -> None:
    for rank in facts:
        assert "already has a LowBitPlugin" in rank["twice"]
        assert "call attach before trainer.train()" in rank["late"]
        assert "attach takes a transformers Trainer, got a" in rank["model"]
        assert "attach takes a configuration such as LoCo(bits=4)" in rank["what"]
        assert "did you mean 'loco'" in rank["name"]
        assert "which the Trainer fixes when it begins" in rank["batch"]
