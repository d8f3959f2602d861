"""The strategies in a configuration file of LightningCLI: how their compressor may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI

from lowbit_strategy import LoCo, WarmUp, preset
from lowbit_strategy.custom_loop import MonitorOptions
from lowbit_strategy.lightning import CompressionMonitor
from testing.training.regression import Regression

pytest.importorskip("jsonargparse")

CONFIG = """\
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: lowbit_strategy.lightning.{strategy}
    init_args:
      seed: 3
      compressor: {compressor}
"""
NESTED = """
        class_path: lowbit_strategy.WarmUp
        init_args:
          steps: 7
          compressor: {class_path: lowbit_strategy.LoCo, init_args: {bits: 3}}
"""


def made_from(folder: Path, strategy: str, compressor: str) -> Any:
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(strategy=strategy, compressor=compressor))
    cli = LightningCLI(Regression, args=["--config", str(path)], run=False, save_config_callback=None)
    return cli.trainer.strategy


DDP, FSDP = "LowBitDDPStrategy", "LowBitFSDPStrategy"


@pytest.mark.parametrize(
    ("strategy", "compressor", "expected"),
    [
        (DDP, "loco", LoCo()),
        (FSDP, "loco2", preset("loco2")),
        (DDP, "{class_path: lowbit_strategy.LoCo, init_args: {bits: 8, beta: 1e-1}}", LoCo(bits=8, beta=0.1)),
        (FSDP, "{class_path: LoCo}", LoCo()),
        (DDP, NESTED, WarmUp(steps=7, compressor=LoCo(bits=3))),
        (FSDP, "null", LoCo()),
    ],
)
def test_a_compressor_is_a_preset_s_name_or_a_class(
    tmp_path: Path, strategy: str, compressor: str, expected: Any
) -> None:
    made = made_from(tmp_path, strategy, compressor)
    assert type(made).__name__ == strategy
    assert made.compressor == expected
    assert made.options.seed == 3


def test_an_unknown_preset_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises((ValueError, SystemExit), match="unknown compressor 'loca'; did you mean 'loco'"):
        made_from(tmp_path, "LowBitDDPStrategy", "loca")


def test_an_option_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.format(strategy="LowBitDDPStrategy", compressor="loco"))
    arguments = ["--config", str(path), "--trainer.strategy.init_args.compressor", "loco2"]
    cli = LightningCLI(Regression, args=arguments, run=False, save_config_callback=None)
    strategy: Any = cli.trainer.strategy
    assert strategy.compressor == preset("loco2")


def test_a_monitor_s_options_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    callback = (
        "{class_path: lowbit_strategy.lightning.CompressionMonitor, init_args: {every_n_steps: 7, record: false}}"
    )
    path.write_text(CONFIG.format(strategy="LowBitDDPStrategy", compressor="loco") + f"  callbacks: [{callback}]\n")
    cli = LightningCLI(Regression, args=["--config", str(path)], run=False, save_config_callback=None)
    options = [each.options for each in cli.trainer.callbacks if isinstance(each, CompressionMonitor)]  # type: ignore[attr-defined]
    assert options == [MonitorOptions(every_n_steps=7)]
    assert CompressionMonitor(7).options == CompressionMonitor(MonitorOptions(7)).options == MonitorOptions(7)
