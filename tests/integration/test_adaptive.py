"""Controllers and observation on several real ranks, at the engine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lowbit_strategy.adaptation.driver import AdaptiveDriver
from lowbit_strategy.collectives.comm import GroupComm
from lowbit_strategy.control import Accordion, Bounds, GraVAC, Guard, Static
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.telemetry.observe import Observer
from testing.counting.traffic import count_traffic
from testing.invariants.harness import SPECS, InvariantHarness
from testing.processes.scenarios import Facts, all_but, scenarios

LAYOUTS = ("ddp", "fsdp")
EXACT = LoCo(bits=2, block_size=64, beta=0.0, residual="float32", reset_steps=None)
METHODS = {"loco": EXACT, "topk": TopK(density=0.1)}


def observing(folder: Path, layout: str, method: str) -> Facts:
    """Three steps, the last one observed; beside it the same figures from residuals and from counted traffic."""
    comm = GroupComm(dist.new_group())
    harness = InvariantHarness("dense", layout, comm)
    sync = harness.sync(METHODS[method])
    observer = Observer(sync, wants=lambda step: step == 2, group_by="parameter")
    counted = []
    for step in range(3):
        before = {spec.name: sync.state.residual(spec.name) for spec in SPECS}
        grads = harness.grads(step)
        with count_traffic() as traffic:
            harness.reduce(sync, [list(grads)], grads, torch.float32)
        counted.append(traffic.nbytes)
        sync.end_step()
    compensated, left = {}, {}
    for spec in SPECS:
        residual = sync.state.residual(spec.name)
        if residual is not None:  # exact error feedback: what was not sent is the residual
            compensated[spec.name] = float((grads[spec.name] + before[spec.name]).square().sum())
            left[spec.name] = float(residual.square().sum())
    return {
        "observation": observer.last,
        "compensated": compensated,
        "left": left,
        "own_sent_nbytes": observer.own_sent_nbytes,
        "sampling_nbytes": observer.sampling_nbytes,
        "counted": counted[-1],
        "unobserved": counted[-2] if method == "loco" else None,  # messages of top-k differ in size
        "after": comm.sent_nbytes,
    }


@scenarios(observing, world_size=3, layout=LAYOUTS, method=("loco", "topk"))
def test_figures_over_ranks_against_residuals(facts: list[Facts]) -> None:
    names = facts[0]["compensated"].keys()
    assert "matrix" in names
    for fact in facts:
        for name in names:
            compensated, left = (sum(each[key][name] for each in facts) for key in ("compensated", "left"))
            figures = fact["observation"].groups[name]
            assert figures.relative_error == pytest.approx((left / compensated) ** 0.5, rel=1e-5)
            assert figures.compensated_norm == pytest.approx(compensated**0.5, rel=1e-5)
        assert fact["observation"].nonfinite == ()


@scenarios(observing, world_size=3, layout=LAYOUTS, method=("loco", "topk"))
def test_bytes_are_those_handed_to_the_collectives(facts: list[Facts]) -> None:
    for fact in facts:
        assert fact["own_sent_nbytes"] + fact["sampling_nbytes"] == fact["counted"]
        assert fact["unobserved"] in (None, fact["own_sent_nbytes"])  # what observing sends is left out
        assert fact["observation"].sent_nbytes == pytest.approx(sum(f["own_sent_nbytes"] for f in facts) / 3)


@scenarios(observing, world_size=3, layout=LAYOUTS, method=("loco", "topk"))
def test_all_ranks_see_the_same(facts: list[Facts]) -> None:
    assert facts[0]["observation"] == facts[1]["observation"] == facts[2]["observation"]


RANK_4, RANK_1 = (PowerSGD(rank=rank, start_step=0) for rank in (4, 1))


def guarded(heavy: Compressor, light: Compressor) -> Guard:
    """A level for each parameter, by the error of both."""
    bounds = Bounds(max_error=0.5, max_end_to_end=0.9, patience=1)
    return Guard(inner=Static(heavy), bounds=bounds, fallback=light, observe_every=7, group_by="parameter")


CONTROLLERS: dict[str, Any] = {
    "gravac": (
        GraVAC(candidates=tuple(LoCo(bits=bits, block_size=64) for bits in (8, 4, 3, 2)), window=10, omega=0.0),
        120,
    ),
    "gravac-topk": (GraVAC(candidates=GraVAC.geometric(TopK(), "density", 0.2, 0.01), window=20, epsilon=0.4), 100),
    "accordion": (Accordion(light=LoCo(bits=8), heavy=LoCo(bits=2), interval=5, unit="steps", eta=0.3), 40),
    "accordion-powersgd": (Accordion(light=RANK_4, heavy=RANK_1, interval=5, unit="steps", eta=0.3), 40),
    "accordion-topk": (
        Accordion(light=TopK(density=0.1), heavy=TopK(density=0.005), interval=5, unit="steps", eta=0.3),
        40,
    ),
    "guard": (guarded(RANK_1, LoCo(bits=4)), 20),
    "guard-topk": (guarded(TopK(density=0.01), LoCo(bits=4)), 20),
}


def deciding(folder: Path, layout: str, controller: str, num_steps: int | None = None) -> Facts:
    """Ranks with gradients and step times of their own."""
    harness = InvariantHarness("dense", layout, GroupComm(dist.new_group()))
    sync = harness.sync()
    chosen, usual_steps = CONTROLLERS[controller]
    driver = AdaptiveDriver(chosen, sync, timer=lambda: time.perf_counter() * (1 + harness.comm.rank))
    levels = []
    for step in range(num_steps or usual_steps):
        grads = harness.grads(step % 7)
        harness.run(sync, grads)
        levels.append(tuple(driver.levels.values()))
    return {"levels": levels, "state": driver.state}


def check_agreement(facts: list[Facts]) -> None:
    assert facts[0]["levels"] == facts[1]["levels"]
    assert facts[0]["state"] == facts[1]["state"]
    assert len(set(facts[0]["levels"])) > 1  # something was decided


@scenarios(deciding, world_size=2, layout=LAYOUTS, controller=tuple(CONTROLLERS))
def test_ranks_never_diverge(facts: list[Facts]) -> None:
    check_agreement(facts)


@pytest.mark.slow
@scenarios(
    deciding,
    world_size=2,
    layout=LAYOUTS,
    controller=("gravac", "gravac-topk"),
    num_steps=(1000,),
    slow=all_but(layout="ddp", controller="gravac"),
)
def test_ranks_never_diverge_in_many_steps(facts: list[Facts]) -> None:
    check_agreement(facts)
