"""What is sent: conservation, agreement of the ranks, exact bytes, the true mean, dtypes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods._base.positions import SparseCompressor
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.signsgd import SignSGD
from lowbit_strategy.methods.zoo.atomo import ATOMO
from lowbit_strategy.methods.zoo.chunktopk import ChunkTopK
from lowbit_strategy.methods.zoo.threelc import ThreeLC
from testing.counting.traffic import count_traffic
from testing.invariants.harness import (
    SPECS,
    Case,
    Evidence,
    Grads,
    InvariantHarness,
    Subject,
    conserving_form,
    fingerprint,
    relative,
)

_CONSERVATION_STEPS = 4  # at least one per rank: methods take turns


def collect_conservation(harness: InvariantHarness) -> Evidence:
    """Some steps of differing gradients: sums of what went in and out, what is unsent at the end, bytes."""
    sync = harness.sync(conserving_form(harness.compressor))
    total_in: Grads = {}
    total_out: Grads = {}
    prints, traffic = [], []
    for step in range(max(_CONSERVATION_STEPS, harness.world_size)):
        grads = harness.grads(step)
        before = harness.comm.sent_nbytes
        with count_traffic() as counted:
            means = harness.run(sync, grads)
        traffic.append(SentStep(harness.comm.sent_nbytes - before, counted.nbytes, _account(sync)))
        prints.append(fingerprint(means))
        add(total_in, grads)
        add(total_out, means)
    return balance(sync, total_in, total_out) | {"prints": prints, "traffic": traffic}


def add(total: Grads, values: Grads) -> None:
    for spec in SPECS:
        value = values.get(spec.name, torch.zeros(spec.numel)).double()  # DDP's buckets hold no empty tensors
        total[spec.name] = total[spec.name] + value if spec.name in total else value


def balance(sync: GradientSync, total_in: Grads, total_out: Grads) -> Evidence:
    """What went in, what came out and what has not been sent yet, for each parameter that obeys a conservation law."""
    lawful = [name for name, a in sync.state.assignments.items() if a.method.conserves(sync.specs[name])]
    unsent = {name: sync.state.export_unsent(name) for name in lawful}
    return {"in": total_in, "out": total_out, "unsent": unsent}


class Account(NamedTuple):
    """Bytes per step by the methods' own accounting, with bounds of their padding, and whether all is exact."""

    low: int
    high: int
    exact: bool


class SentStep(NamedTuple):
    """What a rank sent in a step: by its communicator's count, as `torch.distributed` got it, and by the methods."""

    claimed: int
    counted: int
    account: Account


def _account(sync: GradientSync) -> Account:
    codecs, padding, reducers, exact = 0, 0, 0, True
    others = sync.ranks.peers.world_size - 1
    hops = 1 if sync.sharded else 2
    for name, assignment in sync.state.assignments.items():
        if isinstance(assignment.method, CodecPair):
            codecs += sync.state.sent_nbytes(name)
            padding += 15 * hops * others
        else:
            assert isinstance(assignment.method, Reducer)
            reducers += sync.state.sent_nbytes(name)
            padding += 32 * others  # reducers cut a bucket, not a parameter: rounding of rows to whole bytes
            exact = exact and assignment.method.fixed_size
    has_codecs = any(isinstance(method, CodecPair) for _, method in sync.state.stores)
    nbytes = codecs + reducers + (16 * hops * others if has_codecs else 0)
    return Account(nbytes - (padding if reducers else 0), nbytes + padding, exact)


def imbalances(evidence: Sequence[Evidence], harness: InvariantHarness) -> dict[str, float]:
    """By parameter with a law: how far what came out plus what is unsent is from what came in, relative to that."""
    world_size = len(evidence)
    out = harness.join([e["out"] for e in evidence])
    errors = {}
    for name, unsent in evidence[0]["unsent"].items():
        if not out[name].numel():
            continue
        total = sum(e["in"][name] for e in evidence) / world_size
        accounted = out[name]
        if unsent is not None:
            accounted = accounted + sum(e["unsent"][name].double() for e in evidence) / world_size
        errors[name] = relative(accounted - total, total)
    return errors


def check_conservation(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    errors = imbalances(evidence, harness)
    if not errors:
        return ["no parameter keeps a law of conservation: nothing was checked"]
    return [
        f"{name}: sent plus unsent differs from what came in by {error:.1e} of it"
        for name, error in errors.items()
        if not error < 2e-5
    ]


def check_agreement(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    return ["ranks hold different bits"] if any(e["prints"] != evidence[0]["prints"] for e in evidence) else []


def check_bytes(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        for at, (claimed, counted, account) in enumerate(e["traffic"]):
            if claimed != counted:
                failures.append(f"rank {rank} step {at}: counted {claimed} bytes, torch.distributed got {counted}")
            low, high = account.low, account.high
            if account.exact and not low <= claimed <= high:
                failures.append(f"rank {rank} step {at}: sent {claimed} bytes, wire_nbytes gives {low} to {high}")
    return failures[:3]


UNBIASED_STEPS = 48  # of methods whose results are right on average only
FEW_STEPS = 6
LAW_TOLERANCE = 0.02  # residuals of one byte are rounded in every step


def compressed(subject: Subject) -> list[str]:
    """Parameters that the configuration itself, with its exemptions, really compresses."""
    return [name for name, a in subject.assignments(subject.preset).items() if a.kind == "compressed"]


def without_law(subject: Subject) -> list[str]:
    return [name for name in compressed(subject) if name not in subject.lawful(subject.preset)]


def saturated(subject: Subject) -> Compressor:
    """The configuration as users have it; of sparse methods without a law of conservation, one that sends everything.

    A sparse result is far from the mean for long, so that an average of few steps shows nothing.
    """
    if isinstance(subject.preset, SparseCompressor) and without_law(subject):
        return dataclasses.replace(subject.preset, density=1.0)
    return subject.preset


def collect_mean(harness: InvariantHarness) -> Evidence:
    """The same gradients step after step, default exemptions: what came out, and what has not been sent yet."""
    compressor = saturated(harness.subject)
    sync = harness.sync(compressor)
    grads, first = harness.grads(0), {}
    total_in: Grads = {}
    total_out: Grads = {}
    averaged = compressor is harness.preset and bool(without_law(harness.subject))
    # What codecs lose on average does not depend on the number of ranks; a wrong factor shows in few steps.
    steps = UNBIASED_STEPS if averaged and harness.world_size == 1 else FEW_STEPS
    for step in range(steps):
        means = harness.run(sync, dict(grads))
        if step == 0:
            first = {name: mean.clone() for name, mean in means.items()}
        add(total_in, grads)
        add(total_out, means)
    return balance(sync, total_in, total_out) | {
        "first": first,
        "kinds": {name: assignment.kind for name, assignment in sync.state.assignments.items()},
        "steps": steps,
        "exact": compressor is not harness.preset,
    }


def check_exempt(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    """Exempt parameters have the mean of the ranks' gradients itself, from the first step on."""
    first = harness.join([e["first"] for e in evidence])
    failures, checked = [], 0
    for name, kind in evidence[0]["kinds"].items():
        if kind == "exempt" and name in first and first[name].numel():
            checked += 1
            mean = sum(e["in"][name] for e in evidence) / len(evidence) / evidence[0]["steps"]
            if not (error := relative(first[name] - mean, mean)) < 1e-6:
                failures.append(f"{name} is exempt but {error:.1e} from the true mean")
    return failures if checked else ["no parameter is exempt: nothing was checked"]


def check_mean(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    """Compressed parameters are scaled as exempt ones: by the law of conservation, exactly or on average."""
    out, steps, kinds = harness.join([e["out"] for e in evidence]), evidence[0]["steps"], evidence[0]["kinds"]
    by_law = imbalances(evidence, harness)
    failures, checked = [], 0
    for name, kind in kinds.items():
        if kind == "exempt" or not out[name].numel():
            continue
        checked += 1
        mean = sum(e["in"][name] for e in evidence) / len(evidence) / steps
        average = out[name] / steps
        error, scale = relative(average - mean, mean), float(average @ mean / mean.square().sum())
        if name in by_law:
            if not by_law[name] < LAW_TOLERANCE:
                failures.append(f"{name}: sent plus unsent differs from what came in by {by_law[name]:.1e} of it")
        elif evidence[0]["exact"] or kind == "high_precision":
            if not error < (1e-6 if evidence[0]["exact"] else 0.03):
                failures.append(f"{name}: {error:.1e} from the mean, {scale:.3f} times it")
        elif steps == UNBIASED_STEPS:
            if not (abs(scale - 1) < 0.15 and error < 0.4):
                failures.append(f"{name}: average of {steps} steps is {scale:.3f} times the mean, {error:.2f} from it")
        elif not 0.5 < scale < 1.5:
            failures.append(f"{name}: average of {steps} steps is {scale:.3f} times the mean")
    return failures if checked else ["every parameter is exempt: nothing was checked"]


def collect_dtypes(harness: InvariantHarness) -> Evidence:
    prints, problems = [], []
    for dtype in (torch.bfloat16, torch.float16):
        sync = harness.sync()
        for step in range(2):
            means = harness.run(sync, harness.grads(step), dtype=dtype)
            prints.append(fingerprint(means))
            for name, mean in means.items():
                if mean.dtype != dtype or not mean.isfinite().all():
                    problems.append(f"{name}: {dtype} in, {mean.dtype} out, finite: {bool(mean.isfinite().all())}")
    return {"prints": prints, "problems": problems}


def check_dtypes(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    differing = check_agreement(evidence, harness) if harness.layout == "ddp" else []  # FSDP2: each has its own rows
    return differing + [problem for e in evidence for problem in e["problems"]][:3]


_ZERO_STEPS = 4  # the phases of all configurations are over by then


def _zero_rows(name: str, shape: Sequence[int]) -> Tensor:
    """Boolean, flat: every third row, of one tensor all."""
    at = torch.zeros(tuple(shape), dtype=torch.bool)
    if shape:
        at[slice(None) if name == "tall" else slice(1, None, 3)] = True
    return at.view(-1)


def collect_zeros(harness: InvariantHarness) -> Evidence:
    """Rows without a gradient on any rank, from the first step on: the largest of what came out."""
    sync, largest = harness.sync(), dict.fromkeys((spec.name for spec in SPECS), torch.zeros(0))
    for step in range(_ZERO_STEPS):
        grads = harness.grads(step)
        for spec in SPECS:
            grads[spec.name][_zero_rows(spec.name, spec.shape)] = 0.0
        for name, mean in harness.run(sync, grads).items():
            largest[name] = torch.maximum(largest[name], mean.abs()) if step else mean.abs()
    return {"largest": largest}


def check_zeros(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    """Rows of zeros stay zeros where the method says so, and only there; tensors of zeros always."""
    largest, sharded = harness.join([e["largest"] for e in evidence]), harness.layout == "fsdp"
    assignments, failures, moved = harness.subject.assignments(harness.compressor), [], []
    for spec in SPECS:
        if largest[spec.name].numel() != spec.numel:
            continue  # DDP's buckets hold no empty tensors
        method = assignments[spec.name].method
        found = float(largest[spec.name][_zero_rows(spec.name, spec.shape)].sum())
        if method.keeps_zero_rows(dataclasses.replace(spec, sharded=sharded)) or spec.name == "tall":
            if found:
                failures.append(f"{spec.name}: zeros became up to {found:.1e}")
        else:
            moved.append(found)
    if moved and not any(moved):
        failures.append("rows of zeros stay zeros, though the method says that they need not")
    return failures


NO_MEAN = (ATOMO, ChunkTopK, SignSGD, ThreeLC)  # not within the steps of the shared tests


def has_law(subject: Subject) -> bool:
    return bool(subject.lawful(conserving_form(subject.compressor)))


def _has_mean(subject: Subject) -> bool:
    """Whether results approach the mean: by a law, or for one gradient averaged over steps. SignSGD's are votes, which
    its own tests compare with their definition.
    """
    preset, names = subject.preset, compressed(subject)
    by_law = len(without_law(subject)) < len(names)
    return by_law or (bool(names) and not isinstance(preset, NO_MEAN))


def _has_exempt(subject: Subject) -> bool:
    return any(assignment.kind == "exempt" for assignment in subject.assignments(subject.preset).values())


CASES: dict[str, Case] = {
    "conservation": Case(collect_conservation, check_conservation, has_law, cut_matters=True),
    # FSDP2 leaves each rank its own rows, and one rank agrees with itself.
    "agreement": Case(
        collect_conservation, check_agreement, lambda s: s.layout == "ddp" and s.world_size > 1, cut_matters=True
    ),
    "bytes": Case(collect_conservation, check_bytes, lambda s: s.world_size > 1, cut_matters=True),
    "exempt": Case(collect_mean, check_exempt, _has_exempt),
    "mean": Case(collect_mean, check_mean, _has_mean),
    "zeros": Case(collect_zeros, check_zeros),
    "dtypes": Case(collect_dtypes, check_dtypes),
}
