"""What is kept: overflow, rollback, resume, other buckets, zeros, another grouping."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowbit_strategy.checkpoint.restoring import restore_on_all_ranks
from lowbit_strategy.checkpoint.saver import ResidualSaver
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods.loco import LoCo
from testing.invariants.harness import (
    SPECS,
    Case,
    Evidence,
    Grads,
    InvariantHarness,
    Subject,
    conserving_form,
    fingerprint,
)
from testing.invariants.sums import add, balance, check_conservation, has_law

_POISON = (("matrix", float("inf")), ("tall", float("nan")), ("odd", float("-inf")), ("scalar", float("nan")))


def collect_nonfinite(harness: InvariantHarness) -> Evidence:
    """One rank's gradients hold inf and NaN in the second step."""
    sync = harness.sync()
    harness.run(sync, harness.grads(0))
    poisoned = harness.grads(1)
    if harness.comm.rank == harness.world_size - 1:
        for name, value in _POISON:
            poisoned[name][poisoned[name].numel() // 2] = value
    means = harness.run(sync, poisoned)
    bad = {name for name, _ in _POISON if name in means and not means[name].isfinite().all()}
    dirty = sum(not tensor.isfinite().all() for tensor in sync.state.all_tensors() if tensor.is_floating_point())
    after = harness.run(sync, harness.grads(2))
    still = [name for name, mean in after.items() if not mean.isfinite().all()]
    return {"bad": bad, "dirty": dirty, "still": still}


def check_nonfinite(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    for name, _ in _POISON:
        reached = [name in e["bad"] for e in evidence]
        if not (all(reached) if harness.layout == "ddp" else any(reached)):
            failures.append(f"{name}: a non-finite gradient did not reach the results (ranks: {reached})")
    for rank, e in enumerate(evidence):
        if e["dirty"]:
            failures.append(f"rank {rank}: {e['dirty']} state tensors hold inf or NaN")
        if e["still"]:
            failures.append(f"rank {rank}: the next step is not finite: {e['still']}")
    return failures


def collect_rollback(harness: InvariantHarness) -> Evidence:
    """A loss scaler's overflow on one rank: everything is as before the step, on all ranks."""
    sync = harness.sync(skips_overflow=True)
    harness.run(sync, harness.grads(0))
    sync.follow_phase()
    before, step_index = fingerprint(sync.state.all_tensors()), sync.step_index
    poisoned = harness.grads(1)
    if harness.comm.rank == 0:
        poisoned["cube"][7] = float("inf")
    harness.reduce(sync, [list(poisoned)], poisoned, torch.float32)
    counted = sync.end_step()
    same = fingerprint(sync.state.all_tensors()) == before and sync.step_index == step_index
    return {"counted": counted, "same": same}


def check_rollback(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        if e["counted"]:
            failures.append(f"rank {rank}: an overflowed step counted")
        elif not e["same"]:
            failures.append(f"rank {rank}: state is not what it was before the overflowed step")
    return failures


def collect_resume(harness: InvariantHarness) -> Evidence:
    """Four steps that write a checkpoint after the second, four without, and two of an engine that reads it."""
    assert harness.folder is not None
    checkpoint = harness.folder / f"{harness.subject.name}-{harness.layout}.ckpt"
    saving, sync = [], harness.sync()
    for step in range(4):
        if step == 2:
            with ResidualSaver(sync).around(checkpoint, asynchronous=False) as stamp:
                pass
        saving.append(fingerprint(harness.run(sync, harness.grads(step))))
    saving += _state(sync)
    sync = harness.sync()
    straight = [fingerprint(harness.run(sync, harness.grads(step))) for step in range(4)] + _state(sync)
    sync = harness.sync()
    restore_on_all_ranks(sync, checkpoint, stamp, on_world_size_change="reset", on_missing_residual="error")
    resumed = [fingerprint(harness.run(sync, harness.grads(step))) for step in range(2, 4)] + _state(sync)
    return {"saving": saving == straight, "resumed": resumed == straight[2:]}


def _state(sync: GradientSync) -> list[int]:
    return [fingerprint(sync.state.all_tensors()), sync.step_index, sync.num_skipped]


def check_resume(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        if not e["saving"]:
            failures.append(f"rank {rank}: a run that writes a checkpoint gives other bits than one that does not")
        if not e["resumed"]:
            failures.append(f"rank {rank}: a run resumed from its checkpoint gives other bits than one never stopped")
    return failures


def collect_buckets(harness: InvariantHarness) -> Evidence:
    """One bucket, then three in another order."""
    names = [spec.name for spec in SPECS]
    shuffled = [[*names[6:]][::-1], [*names[3:6]], [*names[:3]][::-1]]
    results = []
    for buckets in ([names], shuffled):
        sync = harness.sync()
        for step in range(3):
            means = harness.reduce(sync, buckets, harness.grads(step), torch.float32)
            sync.end_step()
        results.append({name: means[name].clone() for name in sorted(means)})
    differing = [name for name in results[0] if fingerprint([results[0][name]]) != fingerprint([results[1][name]])]
    return {"differing": differing}


def check_buckets(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    differing = sorted({name for e in evidence for name in e["differing"]})
    return [f"other buckets give other bits: {differing}"] if differing else []


def collect_zero(harness: InvariantHarness) -> Evidence:
    """Nothing but zeros, then a step in which one rank's gradient of one parameter is all zero."""
    sync = harness.sync()
    zeros = {spec.name: torch.zeros(spec.numel) for spec in SPECS}
    means = harness.run(sync, zeros)
    nonzero = [name for name, mean in means.items() if mean.count_nonzero()]
    for step in range(2):
        harness.run(sync, harness.grads(step))
    idle = harness.grads(2)
    idle["matrix"].zero_()
    method = sync.state.assignments["matrix"].method
    keeps = isinstance(method, CodecPair) and method.uplink.residual_gain is not None
    before = {key: t.clone() for key, t in sync.state.tensors("matrix").items() if key.startswith("uplink.")}
    harness.run(sync, idle)
    after = sync.state.tensors("matrix")
    moved = [key for key, value in before.items() if not torch.equal(value, after[key])]
    return {"nonzero": nonzero, "moved": moved if keeps else []}


def check_zero(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        if e["nonzero"]:
            failures.append(f"rank {rank}: zeros in, something else out: {e['nonzero']}")
        if e["moved"]:
            failures.append(f"rank {rank}: an idle parameter's residual moved: {e['moved']}")
    return failures


def collect_regroup(harness: InvariantHarness) -> Evidence:
    """Two steps, another method with another block size for two, and back for two: nothing is lost on the way."""
    own = conserving_form(harness.compressor)
    other = LoCo(bits=4, block_size=64, beta=0.5, residual="float32", reset_steps=None, exempt=(), high_precision=())
    sync = harness.sync(own)
    total_in: Grads = {}
    total_out: Grads = {}
    for step in range(6):
        if step in (2, 4):
            sync.use(other if step == 2 else own)
        grads = harness.grads(step)
        add(total_in, grads)
        add(total_out, harness.run(sync, grads))
    return balance(sync, total_in, total_out)


def _has_buckets(subject: Subject) -> bool:
    """Under FSDP2 each module is its own model to methods that look at the whole model."""
    methods = [assignment.method for assignment in subject.assignments(subject.compressor).values()]
    return subject.layout == "ddp" or not any(method.whole_model for method in methods)


CASES: dict[str, Case] = {
    "nonfinite": Case(collect_nonfinite, check_nonfinite, cut_matters=True),
    "rollback": Case(collect_rollback, check_rollback),
    "resume": Case(collect_resume, check_resume),
    "buckets": Case(collect_buckets, check_buckets, _has_buckets, cut_matters=True),
    "zero": Case(collect_zero, check_zero),
    "regroup": Case(collect_regroup, check_conservation, has_law),
}
