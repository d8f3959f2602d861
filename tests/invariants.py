"""What every method must keep, as checks that run inside real processes: see `tests/integration/test_invariants.py`.

A case has two halves. `collect` runs on every rank, drives a `GradientSync` the way the frameworks do and returns what
it saw. `check` gets all ranks' evidence in one place and returns the failures as text. A method that raises fails its
own cases only: the ranks report, and go on with a fresh process group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import dim0_cut
from lowbit_strategy.hooks.bucket import BucketLayout, Entry
from lowbit_strategy.hooks.engine import GradientSync
from lowbit_strategy.reducers.base import Compressor, LanePair
from lowbit_strategy.reducers.ef21 import EF21
from lowbit_strategy.reducers.efsignsgd import EFSignSGD
from lowbit_strategy.reducers.errorfeedback import ErrorFeedback
from lowbit_strategy.reducers.loco import LoCo
from lowbit_strategy.reducers.multiscale import MultiScale
from lowbit_strategy.reducers.natural import NaturalCompression
from lowbit_strategy.reducers.partition import Partition
from lowbit_strategy.reducers.powersgd import PowerSGD
from lowbit_strategy.reducers.qsgd import QSGD
from lowbit_strategy.reducers.registry import PRESETS
from lowbit_strategy.reducers.rotate import Rotate
from lowbit_strategy.reducers.tensors import TensorSpec
from lowbit_strategy.reducers.terngrad import TernGrad
from lowbit_strategy.reducers.warmup import WarmUp
from tests.traffic import count_traffic

LayoutName = Literal["ddp", "fsdp"]
LAYOUTS: tuple[LayoutName, ...] = ("ddp", "fsdp")
GROUP_TIMEOUT = timedelta(seconds=15)

SPECS = (
    TensorSpec("scalar", ()),
    TensorSpec("one", (1,)),
    TensorSpec("empty", (0,)),
    TensorSpec("odd", (37,)),
    TensorSpec("matrix", (24, 70)),
    TensorSpec("tall", (130, 3)),
    TensorSpec("few_rows", (2, 45)),
    TensorSpec("cube", (5, 4, 6)),
    TensorSpec("embedding", (40, 30), "embedding"),
)
Grads = dict[str, Tensor]


def _warmed_up(compressor: Compressor) -> Compressor:
    """The cases take a few steps, and LoCo's warm-up has one of its own."""
    return dataclasses.replace(compressor, warmup_steps=0) if isinstance(compressor, LoCo) else compressor


CONFIGURATIONS: dict[str, Compressor] = {name: _warmed_up(compressor) for name, compressor in PRESETS.items()} | {
    "LoCo, 1 bit after two steps": LoCo(bits=1, levels="fitted", warmup_steps=2),
    "qsgd, L2 norm": QSGD(norm="l2", bits=6),
    "natural, 4 bits": NaturalCompression(bits=4),
    "feedback in 8 bits": ErrorFeedback(compressor=QSGD(bits=4), residual="int8"),
    "EF21, 4 bits": EF21(compressor=LoCo(bits=4)),
    "rotated LoCo": Rotate(compressor=LoCo(bits=3), size=32),
    "rotated EF21": Rotate(compressor=EF21()),
    "partition": Partition(rules=(("m*", LoCo(bits=2)), ("t*", QSGD(bits=8))), default=EFSignSGD()),
    "terngrad, scaler a rank": TernGrad(scaler="rank"),
    "feedback on trits": ErrorFeedback(compressor=TernGrad(block_size=128)),
    "feedback on two scales": ErrorFeedback(compressor=MultiScale(bits=2, finer_bits=2)),
    "rank 1": PowerSGD(rank=1),
    "rank 2, cold start": PowerSGD(rank=2, warm_start=False, start_step=1),
    "warm-up of three": WarmUp(compressor=LoCo(bits=4), steps=3),
}


def everything(compressor: Compressor) -> Compressor:
    """The same compressor with no parameter exempt or milder, also in the compressors that it wraps."""
    changes: dict[str, Any] = {"exempt": (), "milder": ()}
    for field in dataclasses.fields(compressor):
        value = getattr(compressor, field.name)
        if isinstance(value, Compressor):
            changes[field.name] = everything(value)
        elif isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
            changes[field.name] = tuple((part[0], everything(part[1])) for part in value)
    return dataclasses.replace(compressor, **changes)


def gradient(name: str, shape: Sequence[int], rank: int, step: int) -> Tensor:
    """float32, flat: what one rank has for one parameter in one step. Sizes differ between steps and ranks."""
    seed = zlib.crc32(f"{name}/{rank}/{step}".encode())
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(TensorSpec(name, tuple(shape)).numel, generator=generator)
    return values * (1.0 + rank + step % 3)


class Kit:
    """One method under one layout on one rank."""

    def __init__(self, name: str, layout: LayoutName, comm: Comm) -> None:
        self.name = name
        self.layout = layout
        self.comm = comm
        self.preset = CONFIGURATIONS[name]
        self.compressor = everything(self.preset)

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def sync(self, compressor: Compressor | None = None, **options: Any) -> GradientSync:
        return GradientSync(
            self.compressor if compressor is None else compressor,
            SPECS,
            self.comm,
            torch.device("cpu"),
            scatter=self.layout == "fsdp",
            seed=7,
            **options,
        )

    def grads(self, step: int, rank: int | None = None) -> Grads:
        rank = self.comm.rank if rank is None else rank
        return {spec.name: gradient(spec.name, spec.shape, rank, step) for spec in SPECS}

    def run(self, sync: GradientSync, grads: Grads, *, dtype: torch.dtype = torch.float32) -> Grads:
        """One optimizer step in one bucket: the mean of every parameter (FSDP2: of the own rows)."""
        means = self.reduce(sync, [list(grads)], grads, dtype)
        sync.end_step()
        return means

    def reduce(self, sync: GradientSync, buckets: Sequence[Sequence[str]], grads: Grads, dtype: torch.dtype) -> Grads:
        if self.layout == "fsdp":
            return {name: mean for names in buckets for name, mean in self._scatter(sync, names, grads, dtype).items()}
        stages, buffers = [], []
        for i, names in enumerate(buckets):
            layout, x = _ddp_bucket(names, grads, dtype, last=i == len(buckets) - 1)
            stages.append(sync.reduce(layout, x, x))
            buffers.append((layout, x))
        _advance(stages)
        return {
            entry.name: x[entry.offset : entry.offset + grads[entry.name].numel()]
            for layout, x in buffers
            for entry in layout.entries
        }

    def _scatter(self, sync: GradientSync, names: Sequence[str], grads: Grads, dtype: torch.dtype) -> Grads:
        world_size, rank = self.world_size, self.comm.rank
        cuts = {name: dim0_cut(sync.specs[name].shape, world_size) for name in names}
        row_numel = sum(cut.row_numel for cut in cuts.values())
        x = torch.zeros(world_size, row_numel, dtype=dtype)
        entries, at = [], 0
        for name, cut in cuts.items():
            entries.append(Entry(name, at))
            padded = torch.nn.functional.pad(grads[name], (0, cut.row_numel * world_size - cut.numel))
            x[:, at : at + cut.row_numel] = padded.view(world_size, cut.row_numel)
            at += cut.row_numel
        out = torch.full((row_numel,), 3.0, dtype=dtype)
        _advance([sync.reduce(BucketLayout(tuple(entries), row_numel), x.view(-1), out)])
        out /= world_size
        return {e.name: out[e.offset : e.offset + cuts[e.name].row_length(rank)] for e in entries}

    def join(self, rows: Sequence[Grads]) -> Grads:
        """Whole means from what every rank holds."""
        if self.layout == "ddp":
            return rows[0]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _ddp_bucket(names: Sequence[str], grads: Grads, dtype: torch.dtype, *, last: bool) -> tuple[BucketLayout, Tensor]:
    entries, at = [], 0
    for name in names:
        if grads[name].numel():  # as the hook does
            entries.append(Entry(name, at))
            at += grads[name].numel()
    x = torch.cat([grads[entry.name] for entry in entries]).to(dtype)
    return BucketLayout(tuple(entries), last=last), x


def _advance(stages: Sequence[Iterator[Any]]) -> None:
    """As DDP's worker does: start each bucket, then advance all in turn, waiting for what travels."""
    active = [(stage, None) for stage in stages]
    while active:
        following = []
        for stage, pending in active:
            if pending is not None:
                pending.wait()
            with contextlib.suppress(StopIteration):
                following.append((stage, next(stage)))
        active = following


def fingerprint(tensors: Mapping[str, Tensor] | Sequence[Tensor]) -> int:
    """Of the bits of all tensors."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    crc = 0
    for tensor in values:
        crc = zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
    return crc


def relative(error: Tensor, reference: Tensor) -> float:
    return float(error.norm() / reference.norm().clamp(min=1e-30))


# -- cases ---------------------------------------------------------------------------------------------------------

Evidence = dict[str, Any]


def _collect_conservation(kit: Kit) -> Evidence:
    """Six steps of differing gradients: sums of what went in and out, what is owed at the end, bytes."""
    sync = kit.sync(kit.compressor.conserving())
    total_in, total_out, prints, traffic = {}, {}, [], []
    for step in range(6):
        grads = kit.grads(step)
        before = kit.comm.sent_nbytes
        with count_traffic() as counted:
            means = kit.run(sync, grads)
        traffic.append((kit.comm.sent_nbytes - before, counted.nbytes, _account(sync)))
        prints.append(fingerprint(means))
        _add(total_in, grads)
        _add(total_out, means)
    return _settle(sync, total_in, total_out) | {"prints": prints, "traffic": traffic}


def _add(total: Grads, values: Grads) -> None:
    for spec in SPECS:
        value = values.get(spec.name, torch.zeros(spec.numel)).double()  # DDP's buckets hold no empty tensors
        total[spec.name] = total[spec.name] + value if spec.name in total else value


def _settle(sync: GradientSync, total_in: Grads, total_out: Grads) -> Evidence:
    """What went in, what came out and what is still owed, for each parameter."""
    owed, owner_owed, gains = {}, {}, {}
    for name, assignment in sync.assignments.items():
        gains[name] = _gains(assignment.method, sync.scatter)
        if None not in gains[name]:
            owed[name] = _owed(sync.export_residual(name), gains[name][0])
            back = sync.export_owner_residual(name) if len(gains[name]) > 1 else None
            owner_owed[name] = _owed(back, gains[name][-1])
    return {"in": total_in, "out": total_out, "owed": owed, "owner_owed": owner_owed, "gains": gains}


def _gains(method: object, scatter: bool) -> tuple[float | None, ...]:
    if isinstance(method, LanePair):
        return (method.there.gain,) if scatter else (method.there.gain, method.back.gain)
    return (method.gain,)  # type: ignore[attr-defined]


def _owed(residual: Tensor | None, gain: float) -> Tensor | None:
    return None if residual is None else residual.double() / gain


def _account(sync: GradientSync) -> dict[str, Any]:
    """Bytes a step by the methods' own accounting: exact ones, bounds of their padding, and whether all is exact."""
    lanes, padding, reducers, exact = 0, 0, 0, True
    others = sync.comm.world_size - 1
    hops = 1 if sync.scatter else 2
    for name, assignment in sync.assignments.items():
        if isinstance(assignment.method, LanePair):
            lanes += sync.sent_nbytes(name)
            padding += 15 * hops * others
        else:
            reducers += sync.sent_nbytes(name)
            padding += 32 * others  # reducers cut a bucket, not a parameter: rounding of rows to whole bytes
            exact = exact and assignment.method.fixed_size
    has_lanes = bool(sync.lanes)
    return {
        "low": lanes + reducers + (16 * hops * others if has_lanes else 0) - (padding if reducers else 0),
        "high": lanes + reducers + (16 * hops * others if has_lanes else 0) + padding,
        "exact": exact,
    }


def _check_conservation(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    failures = []
    world_size = len(evidence)
    out = kit.join([e["out"] for e in evidence]) if kit.layout == "fsdp" else evidence[0]["out"]
    for name, gains in evidence[0]["gains"].items():
        if None in gains or not out[name].numel():
            continue
        total = sum(e["in"][name] for e in evidence) / world_size
        said = out[name]
        if evidence[0]["owed"][name] is not None:
            said = said + sum(e["owed"][name] for e in evidence) / world_size
        if evidence[0]["owner_owed"][name] is not None:
            said = said + torch.cat([e["owner_owed"][name] for e in evidence])
        if (error := relative(said - total, total)) > 2e-5:
            failures.append(f"{name}: sent plus owed differs from what came in by {error:.1e} of it")
    return failures


def _check_agreement(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    if kit.layout == "ddp" and any(e["prints"] != evidence[0]["prints"] for e in evidence):
        return ["ranks hold different bits"]
    return []


def _check_bytes(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
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


def _collect_mean(kit: Kit) -> Evidence:
    """The same gradients step after step, default exemptions: the average of the results."""
    sync = kit.sync(kit.preset)
    grads = kit.grads(0)
    total: Grads = {}
    first: Grads = {}
    steps = MEAN_STEPS if kit.world_size in (2, 3) else MEAN_STEPS // 4
    for step in range(steps):
        means = kit.run(sync, dict(grads))
        if step == 0:
            first = {name: mean.clone() for name, mean in means.items()}
        for name, mean in means.items():
            total[name] = total.get(name, 0) + mean.double() / steps
    exempt = [name for name, assignment in sync.assignments.items() if assignment.kind == "exempt"]
    remembers = [name for name, a in sync.assignments.items() if None not in _gains(a.method, sync.scatter)]
    return {
        "grads": grads,
        "average": total,
        "first": first,
        "exempt": exempt,
        "remembers": remembers,
        "steps": steps,
    }


def _check_mean(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    failures = []
    average, first = kit.join([e["average"] for e in evidence]), kit.join([e["first"] for e in evidence])
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
        if not kit.compressor.approaches_mean:
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


def _collect_dtypes(kit: Kit) -> Evidence:
    prints, problems = [], []
    for dtype in (torch.bfloat16, torch.float16):
        sync = kit.sync()
        for step in range(2):
            means = kit.run(sync, kit.grads(step), dtype=dtype)
            prints.append(fingerprint(means))
            for name, mean in means.items():
                if mean.dtype != dtype or not mean.isfinite().all():
                    problems.append(f"{name}: {dtype} in, {mean.dtype} out, finite: {bool(mean.isfinite().all())}")
    return {"prints": prints, "problems": problems}


def _check_dtypes(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    return _check_agreement(evidence, kit) + [problem for e in evidence for problem in e["problems"]][:3]


_POISON = (("matrix", float("inf")), ("tall", float("nan")), ("odd", float("-inf")), ("scalar", float("nan")))


def _collect_nonfinite(kit: Kit) -> Evidence:
    """One rank's gradients hold inf and NaN in the second step."""
    sync = kit.sync()
    kit.run(sync, kit.grads(0))
    poisoned = kit.grads(1)
    if kit.comm.rank == kit.world_size - 1:
        for name, value in _POISON:
            poisoned[name][poisoned[name].numel() // 2] = value
    means = kit.run(sync, poisoned)
    bad = {name for name, _ in _POISON if name in means and not means[name].isfinite().all()}
    dirty = sum(not tensor.isfinite().all() for tensor in sync.state_tensors() if tensor.is_floating_point())
    after = kit.run(sync, kit.grads(2))
    still = [name for name, mean in after.items() if not mean.isfinite().all()]
    return {"bad": bad, "dirty": dirty, "still": still}


def _check_nonfinite(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    failures = []
    for name, _ in _POISON:
        reached = [name in e["bad"] for e in evidence]
        if not (all(reached) if kit.layout == "ddp" else any(reached)):
            failures.append(f"{name}: a non-finite gradient did not reach the results (ranks: {reached})")
    for rank, e in enumerate(evidence):
        if e["dirty"]:
            failures.append(f"rank {rank}: {e['dirty']} state tensors hold inf or NaN")
        if e["still"]:
            failures.append(f"rank {rank}: the next step is not finite: {e['still']}")
    return failures


def _collect_rollback(kit: Kit) -> Evidence:
    """A loss scaler's overflow on one rank: everything is as before the step, on all ranks."""
    sync = kit.sync(rollback=True)
    kit.run(sync, kit.grads(0))
    sync.follow_phase()
    before, step_index = fingerprint(sync.state_tensors()), sync.step_index
    poisoned = kit.grads(1)
    if kit.comm.rank == 0:
        poisoned["cube"][7] = float("inf")
    kit.reduce(sync, [list(poisoned)], poisoned, torch.float32)
    counted = sync.end_step()
    same = fingerprint(sync.state_tensors()) == before and sync.step_index == step_index
    return {"counted": counted, "same": same}


def _check_rollback(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        if e["counted"]:
            failures.append(f"rank {rank}: an overflowed step counted")
        elif not e["same"]:
            failures.append(f"rank {rank}: state is not what it was before the overflowed step")
    return failures


def _collect_resume(kit: Kit) -> Evidence:
    """Five steps at a stretch, five again, and three with the state of the first two: the same bits."""
    first, saved, sync = [], None, kit.sync()
    for step in range(5):
        if step == 2:
            sync.follow_phase()  # as checkpoints do
            saved = [tensor.clone() for tensor in sync.state_tensors()]
        first.append(fingerprint(kit.run(sync, kit.grads(step))))
    first.append(fingerprint(sync.state_tensors()))
    sync = kit.sync()
    again = [fingerprint(kit.run(sync, kit.grads(step))) for step in range(5)]
    again.append(fingerprint(sync.state_tensors()))
    sync = kit.sync()
    sync.step_index = 2
    sync.follow_phase()
    for tensor, values in zip(sync.state_tensors(), saved, strict=True):
        tensor.copy_(values)
    resumed = [fingerprint(kit.run(sync, kit.grads(step))) for step in range(2, 5)]
    resumed.append(fingerprint(sync.state_tensors()))
    return {"again": again == first, "resumed": resumed == first[2:]}


def _check_resume(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        if not e["again"]:
            failures.append(f"rank {rank}: the same run again gives other bits")
        elif not e["resumed"]:
            failures.append(f"rank {rank}: a run resumed from its state gives other bits than the uninterrupted one")
    return failures


def _collect_buckets(kit: Kit) -> Evidence:
    """One bucket, then three in another order."""
    names = [spec.name for spec in SPECS]
    shuffled = [[*names[6:]][::-1], [*names[3:6]], [*names[:3]][::-1]]
    results = []
    for buckets in ([names], shuffled):
        sync = kit.sync()
        for step in range(3):
            means = kit.reduce(sync, buckets, kit.grads(step), torch.float32)
            sync.end_step()
        results.append({name: means[name].clone() for name in sorted(means)})
    differing = [name for name in results[0] if fingerprint([results[0][name]]) != fingerprint([results[1][name]])]
    return {"differing": differing, "whole_model": any(m.whole_model for m in sync.reducers)}


def _check_buckets(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    if kit.layout == "fsdp" and evidence[0]["whole_model"]:
        return []  # there each module is a model of its own
    differing = sorted({name for e in evidence for name in e["differing"]})
    return [f"other buckets give other bits: {differing}"] if differing else []


def _collect_zero(kit: Kit) -> Evidence:
    """Nothing but zeros, then a step in which one rank's gradient of one parameter is all zero."""
    sync = kit.sync()
    zeros = {spec.name: torch.zeros(spec.numel) for spec in SPECS}
    means = kit.run(sync, zeros)
    nonzero = [name for name, mean in means.items() if mean.count_nonzero()]
    for step in range(2):
        kit.run(sync, kit.grads(step))
    idle = kit.grads(2)
    idle["matrix"].zero_()
    method = sync.assignments["matrix"].method
    keeps = isinstance(method, LanePair) and method.there.gain is not None
    before = {key: t.clone() for key, t in sync.tensors("matrix").items() if key.startswith("there.")}
    kit.run(sync, idle)
    after = sync.tensors("matrix")
    moved = [key for key, value in before.items() if not torch.equal(value, after[key])]
    return {"nonzero": nonzero, "moved": moved if keeps else []}


def _check_zero(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    failures = []
    for rank, e in enumerate(evidence):
        if e["nonzero"]:
            failures.append(f"rank {rank}: zeros in, something else out: {e['nonzero']}")
        if e["moved"]:
            failures.append(f"rank {rank}: an idle parameter's residual moved: {e['moved']}")
    return failures


def _collect_regroup(kit: Kit) -> Evidence:
    """Two steps, another method with another block size for two, and back for two: nothing is lost on the way."""
    own = kit.compressor.conserving()
    other = LoCo(bits=4, block_size=64, beta=0.5, residual="float32", reset_steps=None, exempt=(), milder=())
    sync = kit.sync(own)
    total_in, total_out = {}, {}
    for step in range(6):
        if step in (2, 4):
            sync.use(other if step == 2 else own)
        grads = kit.grads(step)
        _add(total_in, grads)
        _add(total_out, kit.run(sync, grads))
    return _settle(sync, total_in, total_out)


def _check_regroup(evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    # A method that keeps no residual has nowhere to put what the other one owes.
    if any(gain is None or math.isinf(gain) for gains in evidence[0]["gains"].values() for gain in gains):
        return []
    return _check_conservation(evidence, kit)


class Case(NamedTuple):
    collect: Callable[[Kit], Evidence]
    check: Callable[[Sequence[Evidence], Kit], list[str]]


CASES: dict[str, Case] = {
    "conservation": Case(_collect_conservation, _check_conservation),
    "agreement": Case(_collect_conservation, _check_agreement),
    "bytes": Case(_collect_conservation, _check_bytes),
    "mean": Case(_collect_mean, _check_mean),
    "dtypes": Case(_collect_dtypes, _check_dtypes),
    "nonfinite": Case(_collect_nonfinite, _check_nonfinite),
    "rollback": Case(_collect_rollback, _check_rollback),
    "resume": Case(_collect_resume, _check_resume),
    "buckets": Case(_collect_buckets, _check_buckets),
    "zero": Case(_collect_zero, _check_zero),
    "regroup": Case(_collect_regroup, _check_regroup),
}


# -- running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    preset: str
    layout: LayoutName


Report = dict[tuple[str, str, str], list[str]]


def run_jobs(rank: int, world_size: int, jobs: Sequence[Job]) -> Report:
    """All cases of all jobs in this process group: failures by (preset, layout, case), on rank 0."""
    report: Report = {}
    comm = Comm(dist.new_group(timeout=GROUP_TIMEOUT))
    collects = list(dict.fromkeys(case.collect for case in CASES.values()))
    for job in jobs:
        kit = Kit(job.preset, job.layout, comm)
        for collect in collects:
            evidence = _gather(_attempt(collect, kit))
            raised = [f"rank {r} raised\n{e}" for r, e in enumerate(evidence) if isinstance(e, str)]
            for name, case in CASES.items():
                if case.collect is collect and rank == 0:
                    report[job.preset, job.layout, name] = raised[:1] or _judge(case, evidence, kit)
            if raised:
                comm = kit.comm = Comm(dist.new_group(timeout=GROUP_TIMEOUT))
    return report


def _attempt(collect: Callable[[Kit], Evidence], kit: Kit) -> Evidence | str:
    try:
        return collect(kit)
    except Exception:
        return traceback.format_exc()


def _judge(case: Case, evidence: Sequence[Evidence], kit: Kit) -> list[str]:
    try:
        return case.check(evidence, kit)
    except Exception:
        return [traceback.format_exc()]


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
