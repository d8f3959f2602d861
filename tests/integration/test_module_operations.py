"""What an FSDP2 module costs the host in a step: operations with each preset, as they are on a GPU, beside stock's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit_strategy import PRESETS
from testing.counting.operations import ALONE, CORRECTED, STOCK, of_a_module
from testing.processes.ranks import run_ranks

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "benchmarks/results/gpu_operations.json").read_text()
)
MOST = 3.0  # times stock's
FEW = ("loco", "rotate")
# plain PyTorch, parameter by parameter: for studies, not for large models on GPUs
SLOW = {
    *("acpsgd", "adacomp", "atomo", "eden", "gradiveq", "gspar", "gtopk", "onebitsgd", "powersgd", "sketchedsgd"),
    "threelc",
}


RECORDED_PRESETS = set(RECORDED["operations"]) - {ALONE, STOCK}  # a new one is measured when somebody has a GPU


def test_what_is_written_down_exists() -> None:
    assert set(PRESETS) >= RECORDED_PRESETS


def test_presets_take_at_most_three_times_what_stock_takes() -> None:
    operations = RECORDED["operations"]
    assert {name for name in RECORDED_PRESETS if operations[name] > MOST * operations[STOCK]} == SLOW
    beside = {name: operations[name] - operations[ALONE] for name in operations}  # all but the model itself
    assert {name for name in ("loco", "loco_uniform", "loco3", "loco4") if beside[name] > MOST * beside[STOCK]} == set()


@pytest.mark.parametrize(
    "names", [FEW, pytest.param(tuple(RECORDED_PRESETS - set(FEW) - set(CORRECTED)), marks=pytest.mark.slow)]
)
def test_no_preset_takes_more_than_is_written_down(names: tuple[str, ...]) -> None:
    """Nor fewer: ``python -m benchmarks.gpu_operations --json`` writes that file."""
    if torch.__version__ != RECORDED["torch"]:
        pytest.skip(f"what torch {RECORDED['torch']} does was written down")
    found = run_ranks(of_a_module, 2, [ALONE, STOCK, *names], timeout=600)[0]
    wanted = {name: RECORDED["operations"][name] for name in found}
    assert found == pytest.approx(wanted, rel=0.03)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_correcting_the_second_moment_stays_below_three_times_as_well() -> None:
    found = run_ranks(of_a_module, 2, [STOCK, *CORRECTED], timeout=600)[0]
    assert {name for name in CORRECTED if found[name] > MOST * found[STOCK]} == SLOW.intersection(CORRECTED)
