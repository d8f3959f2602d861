"""Recipes as people run them: each script, shortened, in an empty folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from testing.processes.scripts import REPOSITORY, run_script

ON_CPU = {"ACCELERATE_USE_CPU": "true", "WANDB_MODE": "offline"}
CLM = "recipes/run_clm.py --output_dir runs/clm --max_steps 6 --max_eval_samples 16 --n_layer 2"
RECIPES = {
    f"accelerate launch --config_file recipes/configs/ddp.yaml {CLM}": r"perplexity +=",
    "torchrun --nproc-per-node 2 recipes/lora.py --steps 4": r"trained 57,344 of 3,090,688 parameters, loss \d",
    "torchrun --nproc-per-node 2 recipes/dlrm.py --steps 40": r"rows within 0\.01: accuracy 0\.\d+, \d",
    "python recipes/resnet.py --epochs 1": r"test accuracy 0\.\d",
    "python -m recipes.muloco --steps 60": r"diloco, every 30 steps: a rank sends",
    "python -m recipes.dion --steps 20": r"training loss [23]\.\d",
    "python -m recipes.ray_train --steps 4 --storage $PWD/ray": r"'step': 4\}",
    "torchrun --nproc-per-node 4 -m recipes.torchtitan_llama --steps 40": r"step 40: loss [23]\.\d",
    "python recipes/wandb_offline.py --steps 20": r"loss \d.*offline run in .*runs/wandb",
}
NEEDS = {
    "recipes/lora.py": "peft",
    "recipes/wandb_offline.py": "wandb",
    "recipes.ray_train": "ray",
    "recipes.torchtitan_llama": "torchtitan",
}


@pytest.mark.slow
@pytest.mark.parametrize("command", RECIPES)
def test_a_recipe(command: str, tmp_path: Path) -> None:
    for script, package in NEEDS.items():
        if script in command:
            pytest.importorskip(package)
    shutil.copytree(REPOSITORY / "recipes", tmp_path / "recipes")
    done = run_script(["bash", "-c", command], cwd=tmp_path, env=ON_CPU, timeout=280)
    output = done.stdout + done.stderr
    assert re.search("compressed (pseudo-)?gradient (all-reduce|reduce-scatter) over 2 ranks", output)
    assert re.search(RECIPES[command], output)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_of_the_demo_go_on_without_the_lost_ones(tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    done = run_script(
        [REPOSITORY / "recipes/demo_elastic.py", "--steps", "200", "--every", "10"], cwd=tmp_path, timeout=580
    )
    words = " ".join(done.stdout.split())
    for change in ("lost: .*cellar", "joined: .*cellar", "lost: .*office", "joined: .*office"):
        assert re.search(change, words), done.stdout
    assert (tmp_path / "runs/demo-elastic/loss.png").read_bytes().startswith(b"\x89PNG")


def test_every_recipe_is_on_the_page_and_run() -> None:
    page = (REPOSITORY / "docs" / "recipes.md").read_text(encoding="utf-8")
    helpers = {"gpt.py", "text.py", "demo_train.py", "compression_study.py"}  # parts of others, and a study
    scripts = {path.name for path in (REPOSITORY / "recipes").glob("*.py")} - helpers
    assert [name for name in sorted(scripts) if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(REPOSITORY / "recipes/notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = str(notebook.cells)
    assert "compressed gradient all-reduce over 2 ranks" in printed
    assert re.search(r"test accuracy 0\.9", printed)


def test_the_kubeflow_job_fits_its_schema() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    written = yaml.safe_load((REPOSITORY / "recipes/clusters/kubeflow.yaml").read_text(encoding="utf-8"))
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert job.to_dict() == written  # what the schema does not know would be missing


def test_the_skypilot_task_fits_its_schema() -> None:
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(
        yaml.safe_load((REPOSITORY / "recipes/clusters/skypilot.yaml").read_text(encoding="utf-8"))
    )
    assert task.num_nodes == 2
