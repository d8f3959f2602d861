"""The start-up report of compressors with phases."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.doctor.dry_run import Planned, plan
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.zoo.composed import WarmUp
from lowbit_strategy.plan.startup_report import build_report
from testing.worlds.single import engine

WARMED_UP = WarmUp(compressor=LoCo(bits=1, codebook="fitted"), first=LoCo(), steps=64)


@pytest.mark.parametrize(
    ("compressor", "step"),
    [
        (LoCo(), None),
        (WARMED_UP, 64),
        (WarmUp(compressor=LoCo(), first=LoCo(), steps=9), None),
        (WarmUp(compressor=WARMED_UP, steps=9), 9),
        (PowerSGD(start_step=1000), 1000),
    ],
)
def test_the_report_says_until_when_it_holds(compressor: Compressor, step: int | None) -> None:
    report = plan(nn.Linear(256, 256), compressor, Planned(world_size=2, scatter=False), device=torch.device("cpu"))
    assert report.next_phase == step
    line = f"until step {step}, where the compressor's next phase begins"
    assert (line in report.render()) == (step is not None)


@pytest.mark.parametrize("scatter", [False, True])
def test_a_downlink_with_other_bits_is_reported(scatter: bool) -> None:
    compressor = LoCo(bits=2, codebook="fitted", block_size=64, return_bits=4, return_codebook="uniform")
    report = plan(nn.Linear(256, 256), compressor, Planned(world_size=2, scatter=scatter), device=torch.device("cpu"))
    label = next(group.method for group in report.groups if group.kind == "compressed")
    assert label == "loco 2-bit fitted, blocks of 64" + ("" if scatter else "; downlink loco 4-bit, blocks of 64")


def test_on_a_gpu_methods_without_kernels_are_named() -> None:
    cuda = torch.device("cuda", 0)
    for compressor, named in ((LoCo(), False), (LoCo(residual="none"), True), (PowerSGD(), True)):
        sync = engine(compressor, [TensorSpec("a.weight", (512, 512))])
        report = replace(build_report(sync), device=cuda)
        assert ("plain PyTorch for" in report.kernels) == named, report.kernels
