"""Observation of one rank against a computation of its own; nothing at all between observed steps."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import LocalComm, Pending
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.hooks.runners import BlockingRunner
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.telemetry import measure, observe
from lowbit_strategy.telemetry.measure import StepMeasure
from lowbit_strategy.telemetry.observe import Observer
from testing.worlds.single import SPECS, engine, gradients, reduce_step

COMPRESSOR = LoCo(bits=2, block_size=64, residual="float32", beta=0.0, reset_steps=None)
WEIGHTS = ("blocks.0.weight", "blocks.1.weight")


def test_figures_against_an_independent_computation() -> None:
    # One rank under FSDP2's layout: what comes out is exactly what was sent.
    sync = engine(COMPRESSOR, sharded=True)
    observer = Observer(sync, wants=lambda step: step == 3, group_by="parameter")
    for step in range(4):
        before = {name: sync.state.residual(name) for name in WEIGHTS}
        grads = gradients(step)
        sent = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    compensated = {name: grads[name] + before[name] for name in WEIGHTS} | {"bias": grads["bias"]}
    observation = observer.last
    assert observation is not None
    assert observation.step == 3
    for name, figures in observation.groups.items():
        h, s = compensated[name].double(), sent[name].double()
        assert figures.relative_error == pytest.approx(float((h - s).norm() / h.norm()), rel=1e-5)
        assert figures.cosine == pytest.approx(float(h @ s / (h.norm() * s.norm())), rel=1e-5)
        residual = before.get(name, torch.zeros(1))
        assert figures.residual_norm == pytest.approx(float(residual.norm()), rel=1e-5)
    everything = torch.cat([compensated[name] for name in WEIGHTS]).double()  # what is exempt does not dilute the error
    error = everything - torch.cat([sent[name] for name in WEIGHTS]).double()
    assert observation.total.relative_error == pytest.approx(float(error.norm() / everything.norm()), rel=1e-5)
    assert observation.groups["bias"].relative_error == 0
    assert observation.nonfinite == ()
    assert observation.codec_ms > 0


def test_groups_by_kind() -> None:
    sync = engine(COMPRESSOR)
    observer = Observer(sync, wants=lambda step: True)
    reduce_step(sync, gradients(0))
    assert observer.last is not None
    assert {group: figures.numel for group, figures in observer.last.groups.items()} == {
        "blocks.*.weight": 2 * 48 * 64,
        "bias": 37,
    }


def test_observing_changes_no_result() -> None:
    plain, watched = engine(COMPRESSOR), engine(COMPRESSOR)
    Observer(watched, wants=lambda step: step % 2 == 0)
    for step in range(6):
        means, again = (reduce_step(sync, gradients(step)) for sync in (plain, watched))
        assert all(torch.equal(means[name], again[name]) for name in means)


class Travel:
    is_far = True

    def __init__(self, log: list[str]) -> None:
        self._log = log
        log.append("sent")

    def wait(self) -> None:
        self._log.append("arrived")


class FarComm(LocalComm):
    """Stand-in for ranks that are far apart."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(world_size=2)
        self._log = log

    def _all_to_all(self, out_WB: Tensor, x_WB: Tensor) -> Pending:
        super()._all_to_all(out_WB, x_WB)
        return Travel(self._log)


def test_in_an_observed_step_too_all_messages_leave_before_one_is_waited_for() -> None:
    log: list[str] = []
    ranks = replace(Ranks.flat(FarComm(log)), comes_and_goes=True)  # there is no sample that travels first
    sync = GradientSync(COMPRESSOR, SPECS, ranks, torch.device("cpu"), sharded=False)
    Observer(sync, wants=lambda step: True)
    sync.begin_step()
    runner = BlockingRunner()
    for spec in SPECS:
        layout, x = BucketLayout(((spec.name, 0),), last=spec is SPECS[-1]), gradients(0)[spec.name]
        runner.submit(sync.reduce(layout, x, x), result=x, last=layout.last)
    assert log[: len(SPECS) + 1] == [*["sent"] * len(SPECS), "arrived"]


def test_nothing_at_all_between_observed_steps() -> None:
    sync = engine(COMPRESSOR)
    Observer(sync, wants=lambda step: step % 10 == 0)
    with (
        mock.patch.object(observe, "energies", side_effect=AssertionError("measured")),
        mock.patch.object(measure, "sum_over_ranks", side_effect=AssertionError("summed over ranks")),
    ):
        for step in range(1, 10):
            sync.step_index = step
            reduce_step(sync, gradients(step))


def test_an_overflowed_step_is_observed_when_it_comes_again() -> None:
    sync = engine(COMPRESSOR, skips_overflow=True)
    observer = Observer(sync, wants=lambda step: step == 1)
    reduce_step(sync, gradients(0))
    bad = gradients(1)
    bad["bias"][0] = math.nan
    reduce_step(sync, bad)
    assert observer.last is None
    reduce_step(sync, gradients(1))
    assert observer.last is not None
    assert observer.last.step == 1
    assert math.isfinite(observer.last.total.relative_error)


def test_norms_are_reported_without_the_loss_scale() -> None:
    norms = []
    for scale in (1.0, 1024.0):
        sync = engine(COMPRESSOR)
        observer = Observer(sync, wants=lambda step: True)
        sync.begin_step(scale)
        reduce_step(sync, gradients(0, scale=scale))
        assert observer.last is not None
        norms.append(observer.last.total.compensated_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_gradient_that_is_not_a_number_shows() -> None:
    sync = engine(COMPRESSOR)
    observer = Observer(sync, wants=lambda step: True, group_by="parameter")
    grads = gradients(0)
    grads[WEIGHTS[0]][5] = torch.nan
    reduce_step(sync, grads)
    assert observer.last is not None
    assert observer.last.nonfinite == (WEIGHTS[0],)
    assert math.isnan(observer.last.groups[WEIGHTS[0]].relative_error)
    assert math.isfinite(observer.last.groups[WEIGHTS[1]].relative_error)


def test_blocks_without_a_gradient_do_not_count() -> None:
    """Their residual waits, which is no error of what was sent."""
    block = 64
    compressor = LoCo(bits=4, block_size=block, beta=0.0, residual="float32", reset_steps=None)
    sync = engine(compressor)
    observer = Observer(sync, wants=lambda step: True, group_by="parameter")
    errors = []
    for step in range(3):
        grads = gradients(step)
        if step:
            grads[WEIGHTS[0]][: 40 * block] = 0.0
            grads[WEIGHTS[0]][40 * block :] *= 1e-3
        reduce_step(sync, grads)
        assert observer.last is not None
        errors.append(observer.last.groups[WEIGHTS[0]].relative_error)
    assert max(errors) < 2 * errors[0]


@pytest.mark.parametrize("sharded", [False, True])
def test_the_end_to_end_error_is_that_of_the_result(sharded: bool) -> None:
    sync = engine(COMPRESSOR, sharded=sharded)
    observer = Observer(sync, wants=lambda step: True, group_by="parameter")
    grads = gradients(0)
    result = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    assert observer.last is not None
    for name in WEIGHTS:
        want = float((result[name] - grads[name]).norm() / grads[name].norm())
        assert observer.last.groups[name].end_to_end_error == pytest.approx(want, rel=0.1)  # from a sample


def test_an_empty_bucket_has_its_sample_on_the_device() -> None:
    """NCCL refuses tensors of the CPU."""
    sync = engine(COMPRESSOR)
    sync.begin_step()
    sync.device = torch.device("meta")
    devices = []
    with mock.patch.object(type(sync.ranks.peers), "all_reduce", lambda self, x, *rest: devices.append(x.device)):
        list(StepMeasure(sync).compare([], sync.ranks.peers, iter(())))
    assert devices == [sync.device]
