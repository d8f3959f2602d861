"""Scripts as users start them: import order, namespaces, a configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowbit_strategy import LoCo
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


@pytest.mark.slow
@pytest.mark.parametrize("order", ["never", "first", "last"])
def test_namespaces_with_the_name_alone_and_in_either_import_order(order: str) -> None:
    env = None if order == "never" else {"LOWBIT_AUTOLOAD": "0"}
    lines = run_script([SCRIPTS / "namespaces.py", order], env=env).stdout.splitlines()
    assert len([line for line in lines if line.startswith("registered") and line.endswith(" 0")]) == 4  # missing
    for framework, (module, steps) in MODULES.items():
        for kind in ("ddp", "fsdp"):
            assert f"{framework} {kind} {module}.strategies.LowBit{kind.upper()}Strategy {steps}" in lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "option"),
    [("LowBitDDPStrategy", "find_unused_parameters: true"), ("LowBitFSDPStrategy", "min_shard_numel: 2000")],
)
def test_lightning_cli_with_a_class_path(tmp_path: Path, strategy: str, option: str) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(CONFIG + BY_CLASS.format(strategy=strategy, option=option))
    # No torchrun: Lightning starts the second process itself, from the same command.
    done = run_script([SCRIPTS / "cli.py", "fit", "--config", "config.yaml"], cwd=tmp_path)
    assert done.stdout.count(f"trained {strategy} 2 True") == 2
    assert f"compressor {LoCo(bits=8, beta=0.5, exempt=('@vector', '*.gate.*'))}" in done.stdout


@pytest.mark.slow
def test_lightning_cli_with_the_name_alone(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    (tmp_path / "config.yaml").write_text(f"{CONFIG.rstrip()} ddp\n")
    command = [SCRIPTS / "cli.py", "fit", "--config", "config.yaml", "--trainer.strategy", "loco_ddp"]
    done = run_script(command, cwd=tmp_path)
    assert done.stdout.count("trained LowBitDDPStrategy 2 True") == 2


FABRIC = """\
import torch
from {framework} import Fabric
fabric = Fabric()
net = torch.nn.Linear(16, 64)
model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
fabric.backward(model(torch.ones(2, 16)).sum())
optimizer.step()
print("sent", fabric.strategy.sessions[0].sync.ranks.peers.sent_nbytes > 0, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cli", ["lightning.fabric.cli", "lightning_fabric.cli"])
def test_fabric_run_with_the_name_alone(cli: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FABRIC.format(framework=cli.removesuffix(".cli")))
    command = ["-c", f"from {cli} import _main; _main()", "run", "--strategy", "loco_ddp", "--accelerator", "cpu"]
    done = run_script([*command, "--devices", "2", "train.py"], cwd=tmp_path)
    assert done.stdout.count("True") == 2


@pytest.mark.slow
def test_spawned_processes_with_the_name_alone(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import lightning as L, torch\n"
        "def train(fabric):\n"
        "    net = torch.nn.Linear(16, 64)\n"
        "    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "    fabric.backward(model(torch.ones(2, 16)).sum())\n"
        "    optimizer.step()\n"
        "    print('sent', fabric.strategy.sessions[0].sync.ranks.peers.sent_nbytes > 0, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    L.Fabric(strategy='loco_ddp_spawn', accelerator='cpu', devices=2).launch(train)\n"
    )
    assert run_script("train.py", cwd=tmp_path).stdout.count("True") == 2
