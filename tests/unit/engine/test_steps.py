"""A step's events: regrouping when it begins, one parameter at a time, and what a step may not let go of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from lowbit_strategy import QSGD, Dense, ExDyna, LoCo
from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.carry_over import CarryOver
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.methods._base.method import MethodStore
from testing.compressors import Phased
from testing.worlds.single import SPECS, engine, gradients, reduce_step

WEIGHTS = ("blocks.0.weight", "blocks.1.weight")
TWO_PHASES = Phased(later=LoCo(bits=2, block_size=64), first=LoCo(block_size=64), steps=1)


def test_a_step_that_has_begun_is_not_regrouped_while_it_reduces() -> None:
    sync = engine(TWO_PHASES)
    reduce_step(sync, gradients(0))
    sync.begin_step()
    with mock.patch.object(sync, "assign", side_effect=AssertionError("regrouped inside a collective's stream")):
        reduce_step(sync, gradients(1), end=False)
    assert {method.uplink.fmt.bits for _, method in sync.state.stores if method.residual_gain != torch.inf} == {2}


def test_beginning_twice_is_beginning_once() -> None:
    sync, calls = engine(Dense()), []

    class Listener:
        def begin_step(self) -> None:
            calls.append("begin")

        def end_step(self, *, counted: bool) -> None:
            calls.append("end")

    sync.listeners.add(Listener(), StepPhase.RECORD)
    sync.begin_step()
    sync.begin_step()
    reduce_step(sync, gradients(0))
    assert calls == ["begin", "end"]


def test_listeners_are_called_by_phase() -> None:
    sync, calls = engine(Dense()), []

    def listener(name: str) -> object:
        class Listener:
            def begin_step(self) -> None:
                calls.append(f"{name} begins")

            def end_step(self, *, counted: bool) -> None:
                calls.append(f"{name} ends")

        return Listener()

    for phase in (StepPhase.RECORD, StepPhase.OBSERVE, StepPhase.DECIDE):
        sync.listeners.add(listener(phase.name), phase)
    reduce_step(sync, gradients(0))
    assert calls == [
        *("DECIDE begins", "OBSERVE begins", "RECORD begins"),
        *("OBSERVE ends", "DECIDE ends", "RECORD ends"),
    ]


def test_replaced_state_lives_until_the_step_is_over() -> None:
    """Reads of it may still be queued on another stream when a step begins late, inside a collective."""
    sync = engine(TWO_PHASES)
    reduce_step(sync, gradients(0))
    old = [weakref.ref(tensor) for tensor in sync.state.all_tensors()]
    reduce_step(sync, gradients(1), end=False)
    gc.collect()
    assert all(ref() is not None for ref in old)
    sync.end_step()
    gc.collect()
    assert all(ref() is None for ref in old)


def test_regrouping_holds_one_parameter_in_float32_at_a_time() -> None:
    specs = [TensorSpec(f"blocks.{i}.weight", (48, 64)) for i in range(6)]
    sync = engine(LoCo(bits=4), specs)
    reduce_step(sync, gradients(0, specs))
    exported: list[weakref.ref[Tensor]] = []
    original: Callable[..., Tensor | None] = MethodStore.export_unsent

    def export(store: MethodStore, name: str) -> Tensor | None:
        gc.collect()
        assert all(ref() is None for ref in exported), "an earlier parameter's residual is still held"
        values = original(store, name)
        if values is not None:
            exported.append(weakref.ref(values))
        return values

    with mock.patch.object(MethodStore, "export_unsent", export):
        sync.use(LoCo(bits=2))
    assert len(exported) == len(specs)


def test_leftovers_are_kept_where_gradients_are() -> None:
    carryover = CarryOver(torch.device("cpu"))
    carryover.add("p", torch.ones(3))
    assert carryover.get("p").device.type == "cpu"
    carryover = CarryOver(torch.device("meta"))  # a checkpoint is read on the CPU
    carryover.add("p", torch.ones(3))
    assert carryover.get("p").device.type == "meta"


def test_a_second_backward_pass_of_a_step_has_other_random_numbers() -> None:
    sync = engine(QSGD(bits=2, block_size=64))
    seeds = []
    for _ in range(2):
        reduce_step(sync, gradients(0), end=False)
        seeds.append(sync.step_context().seed)
    assert seeds[0] != seeds[1]
    assert sync.step_index == 0
    sync.end_step()
    assert sync.step_index == 1


def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    sync = engine(ExDyna(density=0.1, exempt=("@vector",)))
    specs = SPECS[:2]
    layout = BucketLayout(((specs[0].name, 0),), last=False)
    x = torch.randn(specs[0].numel)
    sync.begin_step()
    next(sync.reduce(layout, x, x))  # arrives, and waits for a last bucket that never comes
    sync.end_step()
    want, fresh = gradients(1), engine(ExDyna(density=0.1, exempt=("@vector",)))
    fresh.step_index = sync.step_index
    means = reduce_step(sync, {name: grad.clone() for name, grad in want.items()})
    again = reduce_step(fresh, {name: grad.clone() for name, grad in want.items()})
    assert means.keys() == again.keys()
    assert all(torch.equal(means[name], again[name]) for name in means)


def test_buffers_of_a_bucket_that_failed_come_back() -> None:
    sync = engine(LoCo(bits=4))
    reduce_step(sync, gradients(0))
    held = sync.buffers.nbytes
    for step in range(1, 4):
        grads = gradients(step)
        x = torch.cat(list(grads.values()))
        offsets = (0, grads[WEIGHTS[0]].numel(), 2 * grads[WEIGHTS[0]].numel())
        entries = tuple((name, at) for name, at in zip(grads, offsets, strict=True))
        sync.begin_step()
        next(sync.reduce(BucketLayout(entries), x, x))  # abandoned while its bytes travel
        sync.end_step()
    assert sync.buffers.nbytes <= held


def test_bucket_layouts_that_come_no_more_are_dropped() -> None:
    """DDP rebuilds its buckets after the first step, and what the first ones needed must not be kept for ever."""
    sync = engine(LoCo(bits=4))
    first = BucketLayout(((WEIGHTS[0], 0),))
    x = torch.randn(SPECS[0].numel)
    sync.begin_step()
    wait_for_all(sync.reduce(first, x, x))
    bucket = weakref.ref(sync._buckets[first])
    sync.end_step()
    for step in range(40):
        reduce_step(sync, gradients(step))
    gc.collect()
    assert bucket() is None
    assert len(sync._buckets) == 1
