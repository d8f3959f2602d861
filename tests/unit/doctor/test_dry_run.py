"""A plan is what the engine would report, with nothing started and no memory taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowbit_strategy import PRESETS, DiLoCo, LoCo, WeightCode
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.doctor.dry_run import Planned, plan
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.plan.messages import internode_nbytes, step_nbytes

CPU = torch.device("cpu")


def _model() -> nn.Module:
    with torch.device("meta"):  # as large as one likes
        return nn.Sequential(nn.Linear(8192, 8192), nn.LayerNorm(8192), nn.Linear(8192, 8192, bias=False))


@pytest.mark.parametrize("scatter", [False, True])
def test_bytes_and_memory_of_a_large_model(scatter: bool) -> None:
    report = plan(_model(), LoCo(bits=4, block_size=128), Planned(world_size=8, scatter=scatter), device=CPU)
    hops = 1 if scatter else 2
    matrices, vectors = 2 * 8192 * 8192, 3 * 8192
    per_hop = 7 / 8 * (matrices * (4 + 16 / 128) / 8 + vectors * 4)
    assert report.plan.sent_nbytes == pytest.approx(hops * per_hop, rel=1e-3)
    assert report.plan.uncompressed_nbytes(4) == pytest.approx(hops * 7 / 8 * 4 * (matrices + vectors), rel=1e-6)
    owner = 0 if scatter else matrices / 8
    assert memory_of(report.plan).residuals == pytest.approx((matrices + owner) * (1 + 2 / 128), rel=0.15)
    assert {group.kind: group.num_tensors for group in report.groups} == {"compressed": 2, "exempt": 3}
    assert f"over 8 ranks, kernels: {report.kernels}" in report.render()


@pytest.mark.parametrize(
    ("scatter", "options"), [(False, SyncOptions()), (True, SyncOptions()), (True, SyncOptions(shard_size="node"))]
)
def test_nodes_of_several_ranks_have_two_levels(scatter: bool, options: SyncOptions) -> None:
    planned = Planned(scatter=scatter, world_size=8, num_nodes=2)
    report = plan(_model(), LoCo(bits=4, block_size=128), planned, device=CPU, options=options)
    matrices, vectors = 2 * 8192 * 8192, 3 * 8192
    hops = 1 if scatter and options.shard_size is None else 2
    quarter = (matrices * (4 + 16 / 128) / 8 + vectors * 4) / 4  # reduced by each of the four ranks of a node
    assert report.plan.between_nbytes == report.plan.sent_nbytes == pytest.approx(hops / 2 * quarter, rel=1e-3)
    exact = 3 / 4 * 4 * (matrices + vectors)  # in a reduce-scatter inside a node, and DDP's all-gather
    assert report.plan.intra_node_nbytes == pytest.approx(exact * (1 if scatter else 2), rel=1e-3)
    assert "over 2 groups of 4 ranks, exact inside a group," in report.render()
    assert "between nodes" in report.render()
    if scatter:
        exactly, sent = options.shard_size is not None, report.plan.weights
        assert f"weights: {'exact' if exactly else '8-bit codes'}" in report.render()
        assert exactly or internode_nbytes(sent) == pytest.approx(step_nbytes(sent) / 7, rel=1e-6)


def test_one_level_on_two_nodes_says_why() -> None:
    planned = Planned(scatter=False, world_size=8, num_nodes=2)
    report = plan(_model(), LoCo(bits=4), planned, device=CPU, options=SyncOptions(two_level=False))
    assert "one level, because two_level=False" in report.render()
    assert report.plan.between_nbytes == pytest.approx(4 / 7 * report.plan.sent_nbytes, rel=1e-6)


@pytest.mark.parametrize(
    ("scatter", "options", "message"),
    [
        (False, SyncOptions(shard_size="node"), "shard_size is an option of FSDP2"),
        (True, SyncOptions(outer=DiLoCo()), "FSDP2 shards one model over all ranks"),
        (False, SyncOptions(weights=WeightCode()), "is for FSDP2"),
        (True, SyncOptions(shard_size=3), "does not divide the ranks of a node"),
    ],
)
def test_a_dry_run_refuses_what_a_run_would(scatter: bool, options: SyncOptions, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(_model(), LoCo(), Planned(scatter=scatter, world_size=8, num_nodes=2), device=CPU, options=options)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_can_be_planned(name: str) -> None:
    for scatter in (False, True):
        report = plan(_model(), PRESETS[name], Planned(world_size=4, scatter=scatter), device=CPU)
        assert report.plan.sent_nbytes > 0


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        plan(nn.ReLU(), LoCo(), Planned(world_size=2, scatter=False), device=CPU)


def test_every_machine_has_as_many_processes() -> None:
    with pytest.raises(ValueError, match="9 processes on 2 machines"):
        Planned(scatter=False, world_size=9, num_nodes=2)
