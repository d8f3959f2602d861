"""Scripts as users start them: import order, namespaces, a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowbit_strategy import PRESETS, LoCo
from testing.processes.scripts import run_script

SCRIPTS = Path(__file__).parent / "scripts"
MODULES = {  # framework: our module with its strategies, optimizer steps that the script takes there
    "lightning.pytorch": ("lowbit_strategy.lightning", 2),
    "pytorch_lightning": ("lowbit_strategy.pytorch_lightning", 2),
    "lightning.fabric": ("lowbit_strategy.fabric", 1),
    "lightning_fabric": ("lowbit_strategy.lightning_fabric", 1),
}

CONFIG = """\
trainer:
  accelerator: cpu
  devices: 2
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy:
"""
BY_CLASS = """\
    class_path: lowbit_strategy.lightning.{strategy}
    init_args:
      compressor:
        class_path: lowbit_strategy.LoCo
        init_args: {{bits: 8, beta: 0.5, exempt: ["@vector", "*.gate.*"]}}
      {option}
"""


@pytest.mark.parametrize("order", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_namespaces_in_either_import_order(order: str) -> None:
    lines = run_script([SCRIPTS / "namespaces.py", order]).stdout.splitlines()
    assert f"registered {2 * len(PRESETS)}" in lines
    for framework, (module, steps) in MODULES.items():
        for kind in ("ddp", "fsdp"):
            assert f"{framework} {kind} {module}.LowBit{kind.upper()}Strategy {steps}" in lines


@pytest.mark.parametrize(
    ("strategy", "option"),
    [
        pytest.param("LowBitDDPStrategy", "find_unused_parameters: true", marks=pytest.mark.slow),
        ("LowBitFSDPStrategy", "min_shard_numel: 2000"),
    ],
)
def test_lightning_cli_with_a_class_path(tmp_path: Path, strategy: str, option: str) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(CONFIG + BY_CLASS.format(strategy=strategy, option=option))
    # No torchrun: Lightning starts the second process itself, from the same command.
    done = run_script([SCRIPTS / "cli.py", "fit", "--config", "config.yaml"], cwd=tmp_path)
    assert done.stdout.count(f"trained {strategy} 2 True") == 2
    assert f"compressor {LoCo(bits=8, beta=0.5, exempt=('@vector', '*.gate.*'))}" in done.stdout
