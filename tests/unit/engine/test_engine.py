"""One model's synchronization: what a step is, when things happen in it, and what is kept between steps."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lowbit_strategy.collectives.comm import wait_for_all
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepPhase
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.registry import as_compressor
from lowbit_strategy.ranks.ranks import Ranks
from testing.compressors import Phased
from testing.worlds.simulated import SimulatedWorld
from testing.worlds.single import SPECS, engine, gradients, reduce_step

EXACT = LoCo(bits=4, block_size=64, beta=0.0, residual="float32", reset_steps=None)
W0, W1 = "blocks.0.weight", "blocks.1.weight"


class Log:
    """A listener that writes down when it is called, and may act then."""

    def __init__(self, name: str, log: list[str], act: object = None) -> None:
        self.name, self.log, self.act = name, log, act

    def begin_step(self) -> None:
        self.log.append(f"{self.name} begins")
        if callable(self.act):
            self.act()

    def end_step(self, *, counted: bool) -> None:
        self.log.append(f"{self.name} ends {counted}")


def one(sync: GradientSync, name: str, x: torch.Tensor, *, last: bool = True) -> torch.Tensor:
    """One bucket with one parameter; the mean."""
    sync.begin_step()
    wait_for_all(sync.reduce(BucketLayout(((name, 0),), last=last), x, x))
    return x


def test_a_step_begins_with_decisions_and_ends_with_measurements() -> None:
    log: list[str] = []
    sync = engine(EXACT)
    for name, phase in (("record", StepPhase.RECORD), ("monitor", StepPhase.OBSERVE), ("control", StepPhase.DECIDE)):
        sync.listeners.add(Log(name, log), phase)
    reduce_step(sync, gradients(0))
    order = ["control", "monitor", "record"], ["monitor", "control", "record"]
    assert log == [f"{name} begins" for name in order[0]] + [f"{name} ends True" for name in order[1]]


def test_a_step_begins_once_whoever_begins_it() -> None:
    log: list[str] = []
    sync = engine(EXACT)
    sync.listeners.add(Log("control", log), StepPhase.DECIDE)
    sync.begin_step()
    sync.begin_step()
    reduce_step(sync, gradients(0), end=False)
    assert log == ["control begins"]
    sync.end_step()
    sync.begin_step()
    assert log == ["control begins", "control ends True", "control begins"]


def test_listeners_that_leave_are_called_no_more() -> None:
    log: list[str] = []
    sync, listener = engine(EXACT), Log("control", log)
    sync.listeners.add(listener, StepPhase.DECIDE)
    sync.listeners.remove(listener)
    reduce_step(sync, gradients(0))
    assert log == []


def test_a_decision_is_in_force_in_the_step_that_it_begins() -> None:
    sync = engine(EXACT)
    sync.listeners.add(Log("control", [], lambda: sync.use(Dense())), StepPhase.DECIDE)
    grads = gradients(0)
    means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    assert all(torch.equal(means[name], grads[name]) for name in grads)


def test_a_step_without_gradients_counts_on_one_rank_only() -> None:
    """FSDP2 does not call a reduce-scatter on one rank; elsewhere a second optimizer may have stepped."""
    alone = engine(EXACT)
    alone.end_step()
    assert alone.step_index == 1
    comm = SimulatedWorld(2).comms[0]
    together = GradientSync(EXACT, SPECS, Ranks.flat(comm), torch.device("cpu"), sharded=False)
    together.end_step()
    assert together.step_index == 0


def test_two_backward_passes_are_one_step_with_other_seeds() -> None:
    """Without no_sync every pass reduces; what is random in the second must not repeat the first."""
    sync = engine(QSGD(bits=2, exempt=()))
    first = one(sync, W0, gradients(0)[W0])
    second = one(sync, W0, gradients(0)[W0])
    assert sync.step_index == 0
    assert not torch.equal(first, second)
    sync.end_step()
    assert sync.step_index == 1
    again = engine(QSGD(bits=2, exempt=()))
    assert torch.equal(one(again, W0, gradients(0)[W0]), first)


def test_results_depend_on_seed_step_and_rank_alone() -> None:
    def run(seed: int, step_index: int) -> torch.Tensor:
        sync = engine(QSGD(bits=2), seed=seed)
        sync.step_index = step_index
        return reduce_step(sync, gradients(0))[W0]

    assert torch.equal(run(1, 5), run(1, 5))
    assert not torch.equal(run(1, 5), run(2, 5))
    assert not torch.equal(run(1, 5), run(1, 6))
    contexts = [
        GradientSync(EXACT, SPECS, Ranks.flat(comm), torch.device("cpu"), sharded=False).step_context()
        for comm in SimulatedWorld(3).comms
    ]
    assert len({context.shared_seed for context in contexts}) == 1
    assert len({context.seed for context in contexts}) == 3


def test_an_overflow_puts_everything_back_and_is_not_counted() -> None:
    log: list[str] = []
    sync = engine(EXACT, skips_overflow=True)
    reduce_step(sync, gradients(0))
    sync.listeners.add(Log("monitor", log), StepPhase.OBSERVE)
    before = [tensor.clone() for tensor in sync.state.all_tensors()]
    bad = gradients(1)
    bad["bias"][3] = torch.inf
    means = reduce_step(sync, bad, end=False)
    assert not means["bias"].isfinite().all()
    assert not sync.end_step()
    assert (sync.step_index, sync.num_skipped) == (1, 1)
    assert log[-1] == "monitor ends False"
    assert all(torch.equal(a, b) for a, b in zip(before, sync.state.all_tensors(), strict=True))
    reduce_step(sync, gradients(1))
    assert sync.step_index == 2  # the flag is down again


def test_a_save_that_failed_leaves_open_reductions_as_they_were() -> None:
    """A loop may catch the error and step on the gradients."""
    sync = engine(EXACT)
    reduce_step(sync, gradients(0))
    sync.state.carryover.add("bias", torch.ones(37))
    reduce_step(sync, gradients(1), end=False)
    residual = sync.state.residual(W0)
    with contextlib.suppress(MemoryError), sync.taken_back():
        assert sync.state.carryover.get("bias") is not None
        assert not torch.equal(sync.state.residual(W0), residual)
        raise MemoryError
    assert torch.equal(sync.state.residual(W0), residual)
    assert sync.state.carryover.get("bias") is None


def test_residuals_follow_the_loss_scale() -> None:
    plain, scaled = engine(EXACT), engine(EXACT)
    for step, scale in enumerate((4.0, 4.0, 16.0, 2.0)):
        scaled.begin_step(scale)
        wanted = reduce_step(plain, gradients(step))
        found = reduce_step(scaled, gradients(step, scale=scale))
        for name in wanted:  # powers of two: exact
            assert torch.equal(found[name], scale * wanted[name]), (step, name)


@pytest.mark.parametrize("name", ["loco", "topk", "powersgd"])
@pytest.mark.parametrize("discard", ["set_aside", "roll_back"])
def test_copies_follow_the_loss_scale(name: str, discard: str) -> None:
    """A gradient stays open while another optimizer steps and the scale changes, and is then thrown away."""
    found = []
    for scales in ((1.0, 1.0, 1.0), (4.0, 4.0, 16.0)):
        sync = engine(as_compressor(name))
        for step, scale in enumerate(scales[:2]):
            sync.begin_step(scale)
            reduce_step(sync, gradients(step, scale=scale), end=False)
            sync.end_step(None if step == 0 else [W0])
        sync.begin_step(scales[2])
        getattr(sync.transactions, discard)(sync.transactions.open.copy())
        residuals = {spec.name: sync.state.residual(spec.name) for spec in SPECS}
        found.append({each: x / scales[2] for each, x in residuals.items() if x is not None})
    plain, scaled = found
    assert plain
    for each, wanted in plain.items():
        assert torch.equal(scaled[each], wanted), each


def test_phases_change_when_a_step_begins() -> None:
    sync = engine(Phased(later=EXACT, steps=2))
    for step in range(4):
        grads = gradients(step)
        means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
        assert torch.equal(means[W0], grads[W0]) == (step < 2)


def test_regrouping_keeps_the_stores_of_methods_whose_parameters_stay() -> None:
    sync = engine(EXACT)
    reduce_step(sync, gradients(0))
    stores = dict(sync.state.stores)
    sync.assign(dict(sync.state.assignments))
    assert dict(sync.state.stores) == stores
    assert all(sync.state.stores[method] is store for method, store in stores.items())


def test_new_parameters_join_and_the_others_keep_their_state() -> None:
    extended, whole = engine(EXACT, SPECS[:1]), engine(EXACT, SPECS)
    for sync in (extended, whole):
        one(sync, W0, gradients(0)[W0])
        sync.end_step()
    extended.extend(SPECS[1:])
    for step in (1, 2):
        wanted, found = reduce_step(whole, gradients(step)), reduce_step(extended, gradients(step))
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_forgetting_is_starting_anew_with_the_same_methods() -> None:
    sync, fresh = engine(EXACT), engine(EXACT)
    for step in range(3):
        reduce_step(sync, gradients(step))
    sync.state.carryover.add("bias", torch.ones(37))
    sync.forget()
    sync.step_index = 0
    for step in range(2):
        wanted, found = reduce_step(fresh, gradients(step)), reduce_step(sync, gradients(step))
        assert all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize("compressor", [EXACT, QSGD(bits=3), ExDyna(density=0.1)], ids=lambda c: c.name)
def test_bytes_of_state_are_those_of_its_tensors(compressor: object) -> None:
    sync = engine(compressor)  # type: ignore[arg-type]
    assert sync.state.nbytes == sum(tensor.nbytes for tensor in sync.state.all_tensors())
    by_name = sum(t.nbytes for name in sync.specs for t in sync.state.tensors(name).values())
    assert sync.state.nbytes == by_name


def test_a_model_of_one_scalar() -> None:
    sync = engine(LoCo(exempt=()), [TensorSpec("s", ())])
    assert one(sync, "s", torch.tensor([3.0])).item() == pytest.approx(3.0, rel=0.02)
