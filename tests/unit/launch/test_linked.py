"""Predicted steps beside a dry run."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from lowbit_strategy import PRESETS, LoCo
from lowbit_strategy.advisor.cluster import Coding
from lowbit_strategy.launch import launcher
from lowbit_strategy.launch.dry_run import Linked, Planned, plan, time_steps


def predicted(link: str, planned: Planned, latency: str = "1ms", width: int = 2048) -> tuple[float, float]:
    """With 4 bits, and in float32."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    linked, device = Linked.of(link, latency), torch.device("cpu")
    report = plan(module, LoCo(), planned, device=device, far=linked.is_far(device))
    words = linked.predict(report.plan, linked.cluster(LoCo(), device), 0.1).split()
    return float(words[words.index("takes") + 1]), float(words[words.index("float32,") - 3])


@pytest.mark.parametrize("scatter", [False, True])
def test_steps_follow_the_link(scatter: bool) -> None:
    planned = Planned(scatter=scatter, world_size=4, num_nodes=4)
    slow, slow_plain = predicted("100mbit", planned)
    fast, fast_plain = predicted("10gbit", planned)
    assert 0.1 <= fast < slow < slow_plain
    assert fast_plain < slow_plain
    assert slow_plain > 4 * slow if not scatter else slow_plain > 3 * slow


@pytest.mark.parametrize("scatter", [False, True])
def test_what_is_far_is_predicted_as_it_will_travel(scatter: bool) -> None:
    """On CPU all messages at once, so that a step of six modules waits for a few latencies and not for all of them.

    The model is small: of a large one the bytes in flight would decide.
    """
    planned = Planned(scatter=scatter, world_size=4, num_nodes=4)
    near, plain = predicted("10gbit", planned, "2ms", 256)
    far, far_plain = predicted("10gbit", planned, "200ms", 256)
    assert far - near < 4 * 0.2
    assert far_plain - plain > 8 * 0.2


def test_who_gives_the_time_of_computing_plans_for_gpus() -> None:
    linked, device = Linked.of("1gbit", "50ms", "0.1s"), torch.device("cpu")
    cluster = linked.cluster(LoCo(), device)
    assert not linked.is_far(device)
    assert (cluster.coding, cluster.latency_multiplier, cluster.gloo) == (Coding(1e11, 4e-4), 1, False)
    with torch.device("meta"):
        report = plan(nn.Linear(64, 64), LoCo(), Planned(scatter=False, world_size=4, num_nodes=4), device=device)
    assert "assumed: GPUs, 1e+11 elements/s encoded" in linked.predict(report.plan, cluster, 0.1)


@pytest.mark.slow
def test_every_preset_is_timed() -> None:
    linked = Linked.of("1gbit")
    for name, compressor in PRESETS.items():
        cluster = linked.cluster(compressor, torch.device("cpu"))
        assert cluster.coding is not None, name
        assert cluster.coding.numel_per_s > 0, name


def test_what_is_handed_on_is_read() -> None:
    assert Linked.parse(str(Linked.of("1gbit", None, None))) == Linked("1gbit", "0.1ms", "")
    with pytest.raises(ValueError, match="give a bandwidth"):
        Linked.of("fast", None, None)
    with pytest.raises(ValueError, match="give a time"):
        Linked.parse("1gbit,1ms,soon")


def test_a_latency_needs_a_link() -> None:
    with pytest.raises(ValueError, match="need --link"):
        launcher.launch(
            ["--dry_run", "--compute", "1s", "--lowbit_config", "{compressor: loco}", "-m", "tests.unit.launch"]
        )


def test_steps_are_timed_once() -> None:
    found: list[tuple[float, float]] = []
    weight = nn.Parameter(torch.ones(3))
    time_steps(lambda *seconds: found.append(seconds), torch.device("cpu"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(12):
        weight.grad = torch.ones(3)
        time.sleep(0.02)
        optimizer.step()
    assert len(found) == 1
    step_s, optimizer_s = found[0]
    assert 0 < optimizer_s < 0.02 <= step_s < 10
