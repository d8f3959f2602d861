"""A plan is what the engine would report, with nothing started and no memory taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit_strategy import PRESETS, LoCo
from lowbit_strategy.launch.dry_run import Planned
from lowbit_strategy.telemetry.dry_run_report import plan

CPU = torch.device("cpu")


def _model() -> nn.Module:
    with torch.device("meta"):  # as large as one likes
        return nn.Sequential(nn.Linear(8192, 8192), nn.LayerNorm(8192), nn.Linear(8192, 8192, bias=False))


@pytest.mark.parametrize("scatter", [False, True])
def test_bytes_and_memory_of_a_large_model(scatter: bool) -> None:
    report = plan(_model(), LoCo(bits=4, block_size=128), world_size=8, scatter=scatter, device=CPU)
    hops = 1 if scatter else 2
    matrices, vectors = 2 * 8192 * 8192, 3 * 8192
    per_hop = 7 / 8 * (matrices * (4 + 16 / 128) / 8 + vectors * 4)
    assert report.sent_nbytes == pytest.approx(hops * per_hop, rel=1e-3)
    assert report.fp32_nbytes == pytest.approx(hops * 7 / 8 * 4 * (matrices + vectors), rel=1e-6)
    owner = 0 if scatter else matrices / 8
    assert report.residual_nbytes == pytest.approx((matrices + owner) * (1 + 2 / 128), rel=0.15)
    assert {group.kind: group.num_tensors for group in report.groups} == {"compressed": 2, "exempt": 3}
    assert f"over 8 ranks, kernels: {report.kernels}" in report.render()


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("scatter", [False, True])
def test_every_preset_can_be_planned(name: str, scatter: bool) -> None:
    report = plan(_model(), PRESETS[name], world_size=4, scatter=scatter, device=CPU)
    assert report.sent_nbytes > 0


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        plan(nn.ReLU(), LoCo(), world_size=2, scatter=False, device=CPU)


def test_planned_runs_as_text() -> None:
    assert str(Planned.parse("fsdp:16")) == "fsdp:16"
    for wrong in ("fsdp", "ddp:0", "zero:4", "ddp:x"):
        with pytest.raises(ValueError, match="ddp:<processes>"):
            Planned.parse(wrong)
