"""What a step would take without compression is reported once, by measurement, and changes nothing of the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest

from lowbit_strategy import PRESETS
from lowbit_strategy.plan.advice import Wanted, plan_for
from lowbit_strategy.plan.cluster import Cluster, Coding, Link
from lowbit_strategy.plan.cost import step_time
from lowbit_strategy.plan.models import transformer
from lowbit_strategy.plan.uncompressed import uncompressed
from lowbit_strategy.telemetry import forecast as forecasting
from lowbit_strategy.telemetry.forecast import forecast
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import fingerprint, random_numbers
from testing.training.regression import BATCH, Kind, Regression, loader, strategy, trainer

SETUPS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "ddp, far": ("ddp", {"far_links": True}),
    "fsdp": ("fsdp", {}),
    "fsdp, far": ("fsdp", {"far_links": True}),
    "hsdp": ("hsdp", {}),
}
STEPS = 12


def forecasts(folder: Path, setup: str) -> Facts:
    return with_and_without(*SETUPS[setup])


def with_and_without(kind: Kind, options: dict[str, Any]) -> Facts:
    found: Facts = {}
    for name, steps in {"with": 4, "without": 10 * STEPS}.items():
        L.seed_everything(0, verbose=False)
        model = Regression()
        shorter = mock.patch.multiple(forecasting, WARM_STEPS=steps, TIMED_STEPS=3)
        with shorter, listen() as lines:
            made = trainer(strategy(kind, **options), max_steps=STEPS)
            made.fit(model, loader(2 * BATCH * STEPS))
        sync = made.strategy.sync
        found[name] = {
            "lines": [line for line in lines if "without compression it would take" in line],
            "weights": fingerprint(model),
            "sent": sync.ranks.peers.sent_nbytes,
            "random": random_numbers(),
        }
    return found


@scenarios(forecasts, setup=SETUPS)
def test_it_is_reported_once_and_changes_nothing(facts: list[Facts]) -> None:
    check(facts, 1)


def two_levels(folder: Path) -> Facts:
    with nodes_of(2):
        return with_and_without("ddp", {"two_level": True})


@scenarios(two_levels, world_size=4)
def test_with_two_levels(facts: list[Facts]) -> None:
    check(facts, 1)


def local_steps(folder: Path) -> Facts:
    return with_and_without("ddp", {"outer": "diloco"})


@scenarios(local_steps)
def test_rounds_of_local_steps_are_not_predicted_from_single_steps(facts: list[Facts]) -> None:
    check(facts, 0)


def check(facts: list[Facts], count: int) -> None:
    for rank, each in enumerate(facts):
        assert len(each["with"]["lines"]) == (count if rank == 0 else 0)
        assert not each["without"]["lines"]
        assert each["with"]["weights"] == each["without"]["weights"]
        assert each["with"]["sent"] == each["without"]["sent"]
        assert each["with"]["random"] == each["without"]["random"]


def cluster(nbytes_per_s: float, numel_per_s: float) -> Cluster:
    link = Link(1e-4, nbytes_per_s)
    return Cluster(inter_node=link, intra_node=link, codings={"": Coding(numel_per_s)}).coding_as("")


@pytest.mark.parametrize("optimizer_s", [0.0, 0.2])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "hsdp"])
def test_it_finds_what_the_model_of_a_step_takes(layout: Any, optimizer_s: float) -> None:
    """From the step that the model predicts with compression, the one that it predicts without."""
    plan = plan_for(Wanted(transformer(1e8), 4, 1, itemsize=4), layout, PRESETS["loco"])
    slow = cluster(25e6, 1e9)
    text, pays = forecast(plan, slow, step_time(plan, slow, 0.5, optimizer_s).seconds, optimizer_s)
    exact = step_time(uncompressed(plan, 4, 4), slow, 0.5, optimizer_s)
    assert f"it would take about {exact.seconds:.3g} s" in text
    assert pays


def test_compression_that_makes_a_step_longer_is_found() -> None:
    plan = plan_for(Wanted(transformer(1e8), 4, 1, itemsize=4), "ddp", PRESETS["loco"])
    fast = cluster(1e12, 1e8)
    _, pays = forecast(plan, fast, step_time(plan, fast, 0.5).seconds)
    assert pays is False


def test_what_the_bounds_do_not_decide_is_left_open() -> None:
    """A step longer than is predicted without compression, and shorter than that where nothing overlaps."""
    plan = plan_for(Wanted(transformer(1e8), 4, 1, itemsize=4), "ddp", PRESETS["loco"])
    link = cluster(1e9, 3e8)
    step_s = step_time(plan, link, 0.5).seconds
    exact = step_time(uncompressed(plan, 4, 4), link, 0.5)
    assert exact.seconds < step_s < 0.97 * exact.high
    _, pays = forecast(plan, link, step_s)
    assert pays is None
