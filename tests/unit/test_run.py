"""The run module: the script sees what it would see without it; training that goes past an Accelerator is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lowbit_strategy import run
from lowbit_strategy.config_file import accelerate_hooks
from testing.processes.ranks import run_ranks
from testing.processes.scripts import environment

SECTION = "{compressor: loco, bits: 4}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys, pickle, helper\n"
        "def f(): pass\n"
        "pickle.dumps(f)\n"
        "print(__name__, sys.argv[1:], os.path.basename(__file__), helper.__name__)\n"
        "sys.exit(5)\n"
    )
    (tmp_path / "helper.py").write_text("")
    return path


def _status(rank: int, world_size: int, arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        run.main(arguments)
    return ended.value.code


def test_the_script_runs_as_it_would_alone(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lowbit_config", SECTION, str(script), "--lowbit_config", "its own"]
    assert run_ranks(_status, 1, arguments, process_group=None) == [5]
    assert "__main__ ['--lowbit_config', 'its own'] train.py helper" in capsys.readouterr().out


def _refused(rank: int, world_size: int, script: Path) -> None:
    for name in accelerate_hooks._OTHER_WAYS:  # which the tests have imported, and no such script
        sys.modules.pop(name, None)
    with environment({"LOWBIT_CONFIG": SECTION}), pytest.raises(RuntimeError, match="trains without an Accelerator"):
        run.main([str(script)])


def test_training_without_an_accelerator_is_refused_before_its_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "optimizer.step()\n"
        "print('trained')\n"
    )
    run_ranks(_refused, 1, tmp_path / "train.py", process_group=None)
    assert "trained" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "no lowbit_config section: give --lowbit_config FILE, or set LOWBIT_CONFIG"),
        (["--lowbit_config", "{compressor: loca}", "train.py"], "did you mean 'loco'"),
        (["--lowbit_config", SECTION, "missing.py"], "there is no script 'missing.py'"),
    ],
)
def test_bad_input_ends_with_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)
    with environment({"LOWBIT_CONFIG": None}), pytest.raises(SystemExit) as ended:
        run.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
