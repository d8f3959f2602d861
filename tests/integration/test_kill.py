"""A rank dies by SIGKILL in mid-run; the job, started again from its last checkpoint, is as if it never had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.integration.scripts.resumable import train
from tests.training import Kind


def _losses(folder: Path, rank: int) -> dict[int, str]:
    """The last that was written for each step."""
    lines = (folder / f"losses-{rank}.txt").read_text().splitlines()
    return {int(step): loss for step, loss in map(str.split, lines)}


@pytest.mark.parametrize(
    ("kind", "kill_at", "source", "world_size"),
    [
        ("ddp", 8, "step=6.ckpt", 2),
        ("fsdp", 8, "step=6.ckpt", 2),
        ("hsdp", 8, "step=6.ckpt", 2),
        ("ddp", "saving", "step=3.ckpt", 2),
        pytest.param("ddp", 8, "step=6.ckpt", 4, marks=pytest.mark.slow),
        ("fsdp", 8, "step=6.ckpt", 4),  # two nodes
    ],
)
def test_resume_after_a_rank_was_killed(
    tmp_path: Path, kind: Kind, kill_at: int | str, source: str, world_size: int
) -> None:
    steps = _killed_and_resumed(tmp_path, kind, kill_at, source, world_size=world_size)
    assert all(step.endswith("/") for step in steps.values())  # no controller, no decisions


@pytest.mark.parametrize(
    ("kind", "controller"),
    [
        ("ddp", "accordion"),
        ("fsdp", "gravac"),
        pytest.param("fsdp", "accordion", marks=pytest.mark.slow),
        pytest.param("ddp", "gravac", marks=pytest.mark.slow),
    ],
)
def test_decisions_after_a_rank_was_killed_in_the_middle_of_a_phase(
    tmp_path: Path, kind: Kind, controller: str
) -> None:
    steps = _killed_and_resumed(tmp_path, kind, 8, "step=6.ckpt", controller)
    levels = [steps[step].partition("/")[2] for step in range(10)]
    assert len(set(levels)) > 1, levels  # something was decided
    assert levels[5] == levels[6]  # the checkpoint cut a phase


@pytest.mark.parametrize("rule", ["streaming", pytest.param("eager", marks=pytest.mark.slow)])
def test_local_steps_after_a_rank_was_killed_while_a_fragment_was_under_way(tmp_path: Path, rule: str) -> None:
    _killed_and_resumed(tmp_path, "ddp", 8, "step=6.ckpt", rule)
    saved = list((tmp_path / "broken" / "step=6.ckpt.lowbit").glob("*.pt"))
    assert len(saved) == 2
    for path in saved:
        (flight,) = _all(torch.load(path, weights_only=True), "flight")
        assert flight["age"] < flight["delay"]  # the checkpoint is from before it was applied


def _all(saved: Any, key: str) -> list[Any]:
    """What dicts within dicts have under `key`."""
    if not isinstance(saved, dict):
        return []
    return [saved[key]] if key in saved else [found for inner in saved.values() for found in _all(inner, key)]


def _killed_and_resumed(
    tmp_path: Path,
    kind: Kind,
    kill_at: int | str,
    source: str,
    controller: str | None = None,
    world_size: int = 2,
) -> dict[int, str]:
    """Compare with an uninterrupted run; returns the first rank's losses and decisions by step."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    expected = run_ranks(train, world_size, kind, whole, None, controller, process_group=None)
    with pytest.raises(AssertionError, match="rank 1 died of SIGKILL"):
        run_ranks(train, world_size, kind, broken, kill_at, controller, process_group=None)
    resumed = run_ranks(train, world_size, kind, broken, None, controller, process_group=None)
    for rank in range(world_size):
        assert resumed[rank] == (expected[rank][0], source)
        assert _losses(broken, rank) == _losses(whole, rank)
        assert len(_losses(whole, rank)) == 10
    return _losses(whole, 0)
