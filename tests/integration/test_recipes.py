"""Recipes as people run them: each script, shortened, in an empty folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.scripts import REPOSITORY, run_script

ON_CPU = {"ACCELERATE_USE_CPU": "true", "WANDB_MODE": "offline"}
CLM = "recipes/run_clm.py --output_dir runs/clm --max_steps 6 --max_eval_samples 16 --n_layer 2"
RECIPES = {
    f"lowbit launch --config_file recipes/configs/ddp.yaml {CLM}": r"perplexity +=",
    "torchrun --nproc-per-node 2 recipes/lora.py --steps 4": r"trained 57,344 of 3,090,688 parameters, loss \d",
    "python recipes/resnet.py --epochs 1": r"test accuracy 0\.\d",
    "python recipes/wandb_offline.py --steps 20": r"loss \d.*offline run in .*runs/wandb",
}
NEEDS = {"recipes/lora.py": "peft", "recipes/wandb_offline.py": "wandb"}


@pytest.mark.slow
@pytest.mark.parametrize("command", RECIPES)
def test_a_recipe(command: str, tmp_path: Path) -> None:
    for script, package in NEEDS.items():
        if script in command:
            pytest.importorskip(package)
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    done = run_script(["bash", "-c", command], cwd=tmp_path, env=ON_CPU, timeout=280)
    output = done.stdout + done.stderr
    assert "compressed gradient all-reduce over 2 ranks" in output
    assert re.search(RECIPES[command], output)


def test_every_recipe_is_on_the_page_and_run() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    helpers = {"gpt.py", "text.py", "demo_train.py", "compression_study.py"}  # parts of others, and a study
    scripts = {path.name for path in (REPOSITORY / "recipes").glob("*.py")} - helpers
    assert [name for name in sorted(scripts) if f"`{name}`" not in page] == []
