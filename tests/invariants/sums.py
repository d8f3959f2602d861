"""What is sent: conservation, agreement of the ranks, exact bytes, the true mean, dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.codec_pair import CodecPair
from tests.invariants.harness import SPECS, Case, Evidence, Grads, InvariantHarness, fingerprint, relative
from tests.traffic import count_traffic


def collect_conservation(harness: InvariantHarness) -> Evidence:
    """Six steps of differing gradients: sums of what went in and out, what is owed at the end, bytes."""
    sync = harness.sync(harness.compressor.conserving())
    total_in, total_out, prints, traffic = {}, {}, [], []
    for step in range(6):
        grads = harness.grads(step)
        before = harness.comm.sent_nbytes
        with count_traffic() as counted:
            means = harness.run(sync, grads)
        traffic.append((harness.comm.sent_nbytes - before, counted.nbytes, _account(sync)))
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
    lawful = [name for name, a in sync.assignments.items() if a.method.conserves(scatter=sync.scatter)]
    unsent = {name: sync.export_unsent(name) for name in lawful}
    return {"in": total_in, "out": total_out, "unsent": unsent}


def _account(sync: GradientSync) -> dict[str, Any]:
    """Bytes a step by the methods' own accounting: exact ones, bounds of their padding, and whether all is exact."""
    codecs, padding, reducers, exact = 0, 0, 0, True
    others = sync.comm.world_size - 1
    hops = 1 if sync.scatter else 2
    for name, assignment in sync.assignments.items():
        if isinstance(assignment.method, CodecPair):
            codecs += sync.sent_nbytes(name)
            padding += 15 * hops * others
        else:
            reducers += sync.sent_nbytes(name)
            padding += 32 * others  # reducers cut a bucket, not a parameter: rounding of rows to whole bytes
            exact = exact and assignment.method.fixed_size
    has_codecs = any(isinstance(method, CodecPair) for method in sync.stores)
    return {
        "low": codecs + reducers + (16 * hops * others if has_codecs else 0) - (padding if reducers else 0),
        "high": codecs + reducers + (16 * hops * others if has_codecs else 0) + padding,
        "exact": exact,
    }


def check_conservation(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    world_size = len(evidence)
    out = harness.join([e["out"] for e in evidence]) if harness.layout == "fsdp" else evidence[0]["out"]
    for name in evidence[0]["unsent"]:
        if not out[name].numel():
            continue
        total = sum(e["in"][name] for e in evidence) / world_size
        accounted = out[name]
        if evidence[0]["unsent"][name] is not None:
            accounted = accounted + sum(e["unsent"][name].double() for e in evidence) / world_size
        if (error := relative(accounted - total, total)) > 2e-5:
            failures.append(f"{name}: sent plus unsent differs from what came in by {error:.1e} of it")
    return failures


def check_agreement(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    if harness.layout == "ddp" and any(e["prints"] != evidence[0]["prints"] for e in evidence):
        return ["ranks hold different bits"]
    return []


def check_bytes(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        for step, (claimed, counted, account) in enumerate(e["traffic"]):
            if claimed != counted:
                failures.append(f"rank {rank} step {step}: says {claimed} bytes, torch.distributed was given {counted}")
            low, high = account["low"], account["high"]
            if account["exact"] and not low <= claimed <= high:
                failures.append(f"rank {rank} step {step}: sent {claimed} bytes, wire_nbytes gives {low} to {high}")
    return failures[:3]


MEAN_STEPS = 48


def collect_mean(harness: InvariantHarness) -> Evidence:
    """The same gradients step after step, default exemptions: the average of the results."""
    sync = harness.sync(harness.preset)
    grads = harness.grads(0)
    total: Grads = {}
    first: Grads = {}
    steps = MEAN_STEPS if harness.world_size in (2, 3) else MEAN_STEPS // 4
    for step in range(steps):
        means = harness.run(sync, dict(grads))
        if step == 0:
            first = {name: mean.clone() for name, mean in means.items()}
        for name, mean in means.items():
            total[name] = total.get(name, 0) + mean.double() / steps
    exempt = [name for name, assignment in sync.assignments.items() if assignment.kind == "exempt"]
    remembers = [name for name, a in sync.assignments.items() if a.method.conserves(scatter=sync.scatter)]
    return {
        "grads": grads,
        "average": total,
        "first": first,
        "exempt": exempt,
        "remembers": remembers,
        "steps": steps,
    }


def check_mean(evidence: Sequence[Evidence], harness: InvariantHarness) -> list[str]:
    failures = []
    average, first = harness.join([e["average"] for e in evidence]), harness.join([e["first"] for e in evidence])
    for name in average:
        mean = sum(e["grads"][name] for e in evidence) / len(evidence)
        if not mean.numel():
            continue
        if name in evidence[0]["exempt"]:
            if (error := relative(first[name] - mean, mean)) > 1e-6:
                failures.append(f"{name} is exempt but {error:.1e} from the true mean")
            continue
        scale = float(average[name] @ mean.double() / mean.double().square().sum())
        error = relative(average[name] - mean, mean)
        if not harness.compressor.approaches_mean:
            if not 0.02 < scale < 3.0:  # sparse methods leave most in the residual for long
                failures.append(
                    f"{name}: {scale:.2f} times the mean: compressed and exempt tensors are scaled differently"
                )
        elif name in evidence[0]["remembers"]:  # what is missing is owed, and grows no further: see conservation
            if not 0.0 < scale < 1.25:
                failures.append(f"{name}: average is {scale:.3f} times the mean")
        elif evidence[0]["steps"] == MEAN_STEPS and (abs(scale - 1) > 0.15 or error > 0.4):
            failures.append(
                f"{name}: average of {MEAN_STEPS} steps is {scale:.3f} times the mean, {error:.2f} away from it"
            )
        elif not 0.5 < scale < 1.5:
            failures.append(f"{name}: average is {scale:.3f} times the mean")
    return failures


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
    return check_agreement(evidence, harness) + [problem for e in evidence for problem in e["problems"]][:3]


CASES: dict[str, Case] = {
    "conservation": Case(collect_conservation, check_conservation),
    "agreement": Case(collect_conservation, check_agreement),
    "bytes": Case(collect_conservation, check_bytes),
    "mean": Case(collect_mean, check_mean),
    "dtypes": Case(collect_dtypes, check_dtypes),
}
