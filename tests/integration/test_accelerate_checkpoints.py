"""Residuals in Accelerate's checkpoints: saved and resumed, removed with their folder, missing or damaged."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from lowbit_strategy import LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.accelerated import Kind, make, prepared, state_folder, train
from testing.training.comparing import fingerprint

KINDS = ("ddp", "fsdp")
PLUGIN = LowBitPlugin(LoCo(bits=4))


def resumed(folder: Path, kind: Kind) -> Facts:
    whole = prepared(make(kind, PLUGIN))
    train(whole, 4)
    whole.accelerator.save_state(state_folder(folder))
    train(whole, 8, skip=4)
    parts = prepared(make(kind, PLUGIN), lr=1.0)  # the learning rate comes from the checkpoint
    parts.accelerator.load_state(state_folder(folder))
    train(parts, 8, skip=4)
    forgetful = prepared(make(kind, PLUGIN))
    forgetful.accelerator.load_state(state_folder(folder))
    forgetful.sync.forget()
    train(forgetful, 8, skip=4)
    return {
        "whole": whole.losses[4:],
        "parts": parts.losses,
        "same": fingerprint(whole.model) == fingerprint(parts.model),
        "matters": fingerprint(whole.model) != fingerprint(forgetful.model),
        "steps": parts.sync.step_index,
    }


@scenarios(resumed, kind=KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["parts"] == rank["whole"]
        assert rank["same"]
        assert rank["matters"]  # without residuals it would not be
        assert rank["steps"] == 8


def _names(folder: Path) -> list[str]:
    """Of all files, without runs and checksums."""
    return sorted(re.sub(r"-[0-9a-f]{8}\.\d+-[0-9a-f]{16}\.pt$", ".pt", path.name) for path in folder.iterdir())


def saved_again_and_again(folder: Path) -> Facts:
    """Into the same folder, and into folders that Accelerate names and removes."""
    from accelerate.utils import ProjectConfiguration

    config = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2)
    job = prepared(make("ddp", PLUGIN, project_config=config))
    job.accelerator.wait_for_everyone()
    for _ in range(3):
        train(job, 1)
        job.accelerator.save_state()
    config.automatic_checkpoint_naming = False
    for _ in range(2):
        train(job, 1)
        job.accelerator.save_state(state_folder(folder))
    job.accelerator.wait_for_everyone()
    config.automatic_checkpoint_naming = True
    job.accelerator.load_state()
    return {
        "folders": sorted(path.name for path in (folder / "checkpoints").iterdir()),
        "newest": _names(folder / "checkpoints/checkpoint_2/residuals.lowbit"),
        "same": _names(folder / "state/residuals.lowbit"),
        "steps": job.sync.step_index,
    }


@scenarios(saved_again_and_again)
def test_residuals_live_and_go_with_their_folder(facts: list[Facts]) -> None:
    assert facts[0]["folders"] == ["checkpoint_1", "checkpoint_2"]
    assert facts[0]["newest"] == ["stamp.json", "step-3-rank-0-of-2.pt", "step-3-rank-1-of-2.pt"]
    assert facts[0]["same"] == ["stamp.json", "step-5-rank-0-of-2.pt", "step-5-rank-1-of-2.pt"]
    assert facts[0]["steps"] == 3


def damaged(folder: Path) -> Facts:
    job = prepared(make("ddp", PLUGIN))
    train(job, 2)
    job.accelerator.save_state(state_folder(folder))
    job.accelerator.wait_for_everyone()
    residuals = folder / "state/residuals.lowbit"
    if job.accelerator.is_main_process:
        path = next(residuals.glob("step-2-rank-1-of-2-*.pt"))
        path.write_bytes(path.read_bytes()[:100])
    job.accelerator.wait_for_everyone()
    truncated = raised(lambda: prepared(make("ddp", PLUGIN)).accelerator.load_state(state_folder(folder)))
    patient = prepared(make("ddp", LowBitPlugin(LoCo(bits=4), on_missing_residual="reset")))
    patient.accelerator.load_state(state_folder(folder))
    patient.accelerator.wait_for_everyone()
    if job.accelerator.is_main_process:
        shutil.rmtree(residuals)
    job.accelerator.wait_for_everyone()
    uncompressed = prepared(make("ddp", PLUGIN))
    uncompressed.accelerator.load_state(state_folder(folder))
    return {
        "truncated": truncated,
        "patient": patient.sync.step_index,
        "uncompressed": uncompressed.sync.step_index,
    }


@scenarios(damaged)
def test_residual_files_that_are_missing_or_damaged(facts: list[Facts]) -> None:
    for rank in facts:
        assert "ResidualFileError" in rank["truncated"]
        assert 'on_missing_residual="reset"' in rank["truncated"]
        assert rank["patient"] == 2
        assert rank["uncompressed"] == 0
