"""Changing methods between steps: a method's residual is never lost, what stays keeps its state."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.checkpoint.capture import capture
from lowbit_strategy.checkpoint.restoring import restore
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.loco import LoCo
from testing.compressors import Phased
from testing.worlds.single import SPECS, engine, gradients, reduce_step

TWO = LoCo(bits=2, block_size=64, beta=0.0, residual="float32", reset_steps=None)
FOUR = LoCo(bits=4, block_size=128, beta=0.5, residual="float32", reset_steps=None)
WEIGHTS = ("blocks.0.weight", "blocks.1.weight")


def test_carryover_is_sent_by_a_method_that_keeps_no_residual() -> None:
    sync = engine(TWO)
    into, out = (dict.fromkeys(WEIGHTS, torch.zeros(48 * 64)) for _ in range(2))
    for step in range(9):
        if step % 3 == 0:
            sync.use((TWO, FOUR, Dense())[step // 3])
        grads = gradients(step)
        means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
        for name in WEIGHTS:
            into[name], out[name] = into[name] + grads[name], out[name] + means[name]
    for name in WEIGHTS:  # dense keeps nothing back, so all has been sent
        torch.testing.assert_close(out[name], into[name], rtol=1e-4, atol=1e-4)


def test_an_idle_parameter_keeps_its_carryover() -> None:
    sync = engine(TWO)
    reduce_step(sync, gradients(0))
    carryover = sync.state.residual(WEIGHTS[0])
    sync.use(Dense())
    idle = gradients(1) | {WEIGHTS[0]: torch.zeros(48 * 64)}
    assert not reduce_step(sync, idle)[WEIGHTS[0]].any()
    torch.testing.assert_close(sync.state.carryover.get(WEIGHTS[0]), carryover)
    sync.use(TWO)  # and takes it along
    assert WEIGHTS[0] not in sync.state.carryover.waiting
    torch.testing.assert_close(sync.state.residual(WEIGHTS[0]), carryover)


def test_an_overflow_keeps_the_carryover() -> None:
    sync = engine(TWO, skips_overflow=True)
    reduce_step(sync, gradients(0))
    carryover = sync.state.residual(WEIGHTS[0]).clone()
    sync.use(Dense())
    bad = gradients(1)
    bad["bias"][3] = torch.inf
    reduce_step(sync, bad, end=False)
    assert not sync.end_step()
    torch.testing.assert_close(sync.state.carryover.get(WEIGHTS[0]), carryover)
    grads = gradients(2)
    means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    torch.testing.assert_close(means[WEIGHTS[0]], grads[WEIGHTS[0]] + carryover)


@pytest.mark.parametrize(("residual", "nbytes"), [("int8", 1.1), ("float32", 4.1)])
def test_what_is_left_over_takes_no_more_memory_than_it_did(residual: str, nbytes: float) -> None:
    """And gives the same bits as its float32 values."""
    compressor = LoCo(bits=4, beta=0.5, residual=residual, reset_steps=None)  # type: ignore[arg-type]
    sync = engine(compressor, sharded=True, skips_overflow=True)
    reduce_step(sync, gradients(0))
    before = {name: sync.state.export_unsent(name).clone() for name in WEIGHTS}
    sync.use(Dense())
    numel = sum(sync.specs[name].numel for name in WEIGHTS)
    kept = [tensor for each in sync.state.carryover.waiting.values() for tensor in each.tensors.values()]
    assert 0 < sum(tensor.nbytes for tensor in kept) <= nbytes * numel
    for name in WEIGHTS:
        assert torch.equal(sync.state.carryover.get(name), before[name])
    sync.state.rescale_(2.0)
    for name in WEIGHTS:
        assert torch.equal(sync.state.carryover.get(name), 2.0 * before[name])
    sync.state.rescale_(0.5)
    grads = gradients(1)
    means = reduce_step(sync, {name: grad.clone() for name, grad in grads.items()})
    for name in WEIGHTS:
        torch.testing.assert_close(means[name], grads[name] + before[name])
    assert not sync.state.carryover.waiting


def test_carryover_is_saved() -> None:
    sync, other = engine(TWO), engine(Dense())
    reduce_step(sync, gradients(0))
    sync.use(Dense())
    saved = capture(sync)
    restore(other, saved, load_rank=lambda _: saved, on_world_size_change="reset")
    grads = gradients(1)
    means, again = (reduce_step(s, {name: g.clone() for name, g in grads.items()}) for s in (sync, other))
    for name in WEIGHTS:
        assert torch.equal(means[name], again[name])
        assert not torch.equal(means[name], grads[name])


@pytest.mark.parametrize("following", [TWO, Dense()])
def test_resuming_with_another_method_is_as_switching_to_it(following: Compressor) -> None:
    switched, resumed = engine(FOUR), engine(following)
    for step in range(3):
        reduce_step(switched, gradients(step))
    saved = capture(switched)
    restore(resumed, saved, load_rank=lambda _: saved, on_world_size_change="reset")
    switched.use(following)
    for name in WEIGHTS:
        want = switched.state.residual(name) if following is TWO else switched.state.carryover.get(name)
        have = resumed.state.residual(name) if following is TWO else resumed.state.carryover.get(name)
        assert want.any()
        torch.testing.assert_close(have, want)


def test_parameters_whose_method_stays_keep_every_bit() -> None:
    """int8 residuals are copied, not read and written again."""
    light, heavy = LoCo(bits=8), LoCo(bits=2)
    sync = engine(light)
    sync.use(sync.compressor, {spec.name: heavy for spec in SPECS})
    reduce_step(sync, gradients(0))
    before = {key: value.clone() for key, value in sync.state.tensors(WEIGHTS[0]).items()}
    sync.use(sync.compressor, {WEIGHTS[0]: heavy})
    after = sync.state.tensors(WEIGHTS[0])
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert any(value.any() for value in before.values())


def test_a_checkpoint_between_two_phases_continues_as_if_never_stopped() -> None:
    compressor = Phased(later=LoCo(bits=1, codebook="fitted"), first=LoCo(), steps=2)
    straight, saved = engine(compressor), engine(compressor)
    for step in range(2):
        reduce_step(straight, gradients(step))
        reduce_step(saved, gradients(step))
    resumed = engine(compressor)
    state = capture(saved)
    restore(resumed, state, load_rank=lambda rank: state, on_world_size_change="reset")
    for step in range(2, 5):
        want = reduce_step(straight, gradients(step))
        for name, mean in reduce_step(resumed, gradients(step)).items():
            assert torch.equal(mean, want[name]), (step, name)
