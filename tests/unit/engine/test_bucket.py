"""One bucket: its order of work, what observers see, and how it brings methods of several kinds together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import Bucket, BucketLayout, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.efsignsgd import EFSignSGD
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.registry import preset
from lowbit_strategy.methods.topk import TopK
from testing.compressors import ByName
from testing.worlds.single import engine, gradients, reduce_step

SPECS = (TensorSpec("a", (48, 64)), TensorSpec("b", (30, 40)), TensorSpec("c", (33, 21)), TensorSpec("bias", (37,)))
EXACT = LoCo(bits=4, beta=0.0, residual="float32", reset_steps=None)
MIXED = ByName(chosen=(("a", EXACT), ("b", TopK(density=0.1)), ("c", PowerSGD(rank=2))))


class Recorder:
    """An observer that keeps what it is shown."""

    def __init__(self, *, traces: bool, log: list[str] | None = None, name: str = "") -> None:
        self.traces = traces
        self.log = [] if log is None else log
        self.name = name
        self.before: list[Tensor] = []
        self.after: list[Tensor] = []
        self.residuals: dict[str, Tensor] = {}
        self.traced: dict[str, tuple[Tensor, Tensor]] = {}

    def begin_step(self) -> BucketObserver:
        return self

    def end_step(self, *, counted: bool) -> None:
        self.log.append(f"end {self.name} {counted}")

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        self.log.append(f"before {self.name}")
        self.before.append(x.clone())
        yield from stages
        self.after.append(out.clone())
        self.log.append(f"after {self.name}")

    def trace_residual(self, name: str, residual: Tensor | None) -> None:
        if residual is not None:
            self.residuals[name] = residual.clone()

    def trace(self, name: str, compensated: Tensor, sent: Tensor) -> None:
        self.traced[name] = (compensated.clone(), sent.clone())


def observed(compressor: Compressor, *, sharded: bool, steps: int = 3) -> Iterator[tuple[Any, Mapping[str, Tensor]]]:
    """Every step's observer, gradients, residuals before it and results, on one rank."""
    sync = engine(compressor, SPECS, sharded=sharded)
    for step in range(steps):
        recorder = Recorder(traces=True)
        sync.listeners.add(recorder, StepPhase.OBSERVE)
        grads = gradients(step, SPECS)
        residuals = {name: sync.state.residual(name) for name in grads}
        residuals = {name: torch.zeros_like(grads[name]) if r is None else r.clone() for name, r in residuals.items()}
        means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
        sync.listeners.remove(recorder)
        yield recorder, {name: (grads[name], residuals[name], means[name]) for name in grads}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("compressor", [MIXED, EFSignSGD(), TopK(density=0.1)], ids=lambda c: c.name)
def test_observers_are_shown_what_each_parameter_was_to_send_and_what_the_others_decode(
    compressor: Compressor, sharded: bool
) -> None:
    for recorder, facts in observed(compressor, sharded=sharded):
        assert recorder.traced.keys() == facts.keys()
        for name, (grad, residual, mean) in facts.items():
            compensated, sent = recorder.traced[name]
            kept = recorder.residuals.get(name, torch.zeros_like(grad))
            assert torch.equal(kept.view_as(grad), residual.view_as(grad))
            torch.testing.assert_close(compensated, grad + residual)
            if sharded:  # of one rank: the sum is what it has sent
                torch.testing.assert_close(sent, mean, rtol=1e-6, atol=0)


class Compensated(Recorder):
    """Keeps what the bucket says that each method has to send."""

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        self.found = {each.name: bucket.compensated(each, x, out, bucket.residual(each)) for each in bucket.params}
        yield from stages


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("compressor", "idle"), [(preset("loco1"), 32), (TopK(density=0.1), 40 * 64)])
def test_what_waits_in_idle_blocks_is_not_to_be_sent(compressor: Compressor, idle: int, sharded: bool) -> None:
    specs = (TensorSpec("a", (40, 64)),)
    sync = engine(compressor, specs, sharded=sharded)
    grads = gradients(0, specs)
    reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    for num_kept, size in ((96, 1.0), (0, 1.0), (40 * 64, 1e-30)):  # three blocks of 32, none, all with tiny values
        grad = torch.zeros_like(grads["a"])
        grad.view(-1)[:num_kept] = grads["a"].view(-1)[:num_kept] * size
        residual, recorder = sync.state.residual("a"), Compensated(traces=False)
        assert residual is not None
        sync.listeners.add(recorder, StepPhase.OBSERVE)
        active = (grad.view(-1, idle) != 0).any(1).repeat_interleave(idle)
        wanted = torch.where(active, grad.view(-1) + residual.view(-1), 0.0)
        reduce_step(sync, {"a": grad.clone()})
        sync.listeners.remove(recorder)
        assert torch.equal(recorder.found["a"], wanted)


def test_observing_changes_no_bit() -> None:
    plain, watched = engine(MIXED, SPECS), engine(MIXED, SPECS)
    watched.listeners.add(Recorder(traces=True), StepPhase.OBSERVE)
    for step in range(3):
        wanted, found = (reduce_step(sync, gradients(step, SPECS)) for sync in (plain, watched))
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)
        assert all(
            torch.equal(a, b) for a, b in zip(plain.state.all_tensors(), watched.state.all_tensors(), strict=True)
        )


def test_the_innermost_observer_measures_the_methods_alone() -> None:
    log: list[str] = []
    sync = engine(EXACT, SPECS)
    sync.listeners.add(Recorder(traces=False, log=log, name="probe"), StepPhase.DECIDE)
    sync.listeners.add(Recorder(traces=False, log=log, name="monitor"), StepPhase.OBSERVE)
    reduce_step(sync, gradients(0, SPECS))
    assert log == [
        "before probe",
        "before monitor",
        "after monitor",
        "after probe",
        "end monitor True",
        "end probe True",
    ]


def test_a_leftover_residual_is_added_before_anyone_reduces() -> None:
    sync = engine(Dense(), SPECS)
    sync.state.carryover.add("b", torch.full((1200,), 2.0))
    recorder = Recorder(traces=True)
    sync.listeners.add(recorder, StepPhase.OBSERVE)
    grads = gradients(0, SPECS)
    means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    torch.testing.assert_close(means["b"], grads["b"] + 2.0)
    torch.testing.assert_close(recorder.traced["b"][0], grads["b"] + 2.0)
    torch.testing.assert_close(means["a"], grads["a"])


@pytest.mark.parametrize("compressor", [EXACT, TopK(density=0.1), PowerSGD(rank=2)], ids=lambda c: c.name)
def test_a_parameter_may_be_reduced_in_any_bucket(compressor: Compressor) -> None:
    """DDP rebuilds its buckets: state belongs to parameters, and plans to what buckets hold."""
    together, apart = engine(compressor, SPECS), engine(compressor, SPECS)
    for step in range(3):
        grads = gradients(step, SPECS)
        wanted = reduce_step(together, {name: grad.clone() for name, grad in grads.items()})
        for i, name in enumerate(reversed(grads)):
            x = grads[name].clone()
            apart.begin_step()
            wait_for_all(apart.reduce(BucketLayout(((name, 0),), last=i == len(grads) - 1), x, x))
            assert torch.equal(x, wanted[name]), (step, name)
        apart.end_step()


def test_a_bucket_without_parameters_is_no_error() -> None:
    sync = engine(EXACT, SPECS)
    sync.begin_step()
    assert list(sync.reduce(BucketLayout(()), torch.zeros(0), torch.zeros(0))) == []
