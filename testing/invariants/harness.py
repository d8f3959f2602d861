"""The methods under test, gradients of every shape, and a `GradientSync` driven the way the frameworks do it."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm
from lowbit_strategy.collectives.layout import TensorSpec, dim0_row_numel, row_length
from lowbit_strategy.engine.bucket import BucketLayout
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods._base.compressor import Assignment, Compressor, assign_all
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.efsignsgd import EFSignSGD
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.powersgd import PowerSGD
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.registry import PRESETS
from lowbit_strategy.methods.signsgd import SignSGD
from lowbit_strategy.methods.zoo.chunktopk import ChunkTopK
from lowbit_strategy.methods.zoo.composed import Partition, WarmUp
from lowbit_strategy.methods.zoo.eden import EDEN
from lowbit_strategy.methods.zoo.ef21 import EF21
from lowbit_strategy.methods.zoo.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.zoo.natural import NaturalCompression
from lowbit_strategy.methods.zoo.rotate import Rotate
from lowbit_strategy.methods.zoo.sharedscale import MultiScale, TernGrad
from lowbit_strategy.plan.byte_check import ByteCheck
from lowbit_strategy.ranks.ranks import Ranks

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
Evidence = dict[str, Any]


def _warmed_up(compressor: Compressor) -> Compressor:
    """The cases take a few steps: `WarmUp` is over after one."""
    if isinstance(compressor, WarmUp):
        return dataclasses.replace(compressor, steps=1)
    return compressor


CONFIGURATIONS: dict[str, Compressor] = {name: _warmed_up(compressor) for name, compressor in PRESETS.items()} | {
    "LoCo, 1 bit after two steps": WarmUp(compressor=LoCo(bits=1, codebook="fitted"), first=LoCo(bits=4), steps=2),
    "LoCo, 2 bits up, 4 down": LoCo(
        bits=2, codebook="ternary_unit_gain", return_bits=4, return_codebook="uniform", return_beta=0.8
    ),
    "natural, 4 bits": NaturalCompression(bits=4),
    "feedback in 8 bits": ErrorFeedback(compressor=QSGD(bits=4), residual="int8"),
    "LoCo without residual": LoCo(residual="none"),
    "EF21, 1 bit": EF21(compressor=EFSignSGD()),
    "EF21 with momentum": EF21(compressor=QSGD(bits=4), momentum=0.5),
    "Signum, magnitude one": SignSGD(momentum=0.5, scale="one"),
    "rotated LoCo": Rotate(compressor=LoCo(bits=3), size=32),
    "rotated EF21": Rotate(compressor=EF21()),
    "partition": Partition(rules=(("m*", LoCo(bits=2)), ("t*", QSGD(bits=8))), default=EFSignSGD()),
    "feedback on trits": ErrorFeedback(compressor=TernGrad(block_size=128)),
    "feedback on two scales": ErrorFeedback(compressor=MultiScale(bits=2, finer_bits=2)),
    "top-k of chunks, fading": ChunkTopK(density=1 / 4, decay=0.5),
    "top-k of chunks, gathered": ChunkTopK(density=1 / 4, gather=True),
    "top-k of cosines": ChunkTopK(density=1 / 4, cosines=64, values="int8"),
    "demo": ChunkTopK(density=1 / 16, cosines=64, gather=True, decay=0.9),
    "eden, 3 bits and 1, plain feedback": EDEN(bits=1, return_bits=3, beta=0.0, residual="int8"),
    "rank 1": PowerSGD(rank=1),
    "rank 2 from the second step": PowerSGD(rank=2, start_step=1),
    "warm-up of three": WarmUp(compressor=LoCo(bits=4), steps=3),
}


def everything(compressor: Compressor) -> Compressor:
    """The same compressor with no parameter exempt or at high precision, also in the compressors that it wraps."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(compressor):
        value = getattr(compressor, field.name)
        if field.name in ("exempt", "high_precision"):
            changes[field.name] = ()
        elif isinstance(value, Compressor):
            changes[field.name] = everything(value)
        elif isinstance(value, tuple) and any(isinstance(part, tuple) for part in value):
            changes[field.name] = tuple((part[0], everything(part[1])) for part in value)
    return dataclasses.replace(compressor, **changes)


EXACT = {
    "residual": "float32",
    "reset_steps": None,
    "decay": 1.0,
    "clip_norm": None,
    "nesterov": False,
}


def conserving_form(compressor: Compressor) -> Compressor:
    """The same compressor with nothing given away (exact residuals, no reset, decay or momentum), also in those that it
    wraps: the methods' laws of conservation then hold to rounding error.
    """
    changes: dict[str, Any] = {"momentum": 0.0} if isinstance(compressor, DGC) else {}
    for field in (each for each in dataclasses.fields(compressor) if each.init):
        value = getattr(compressor, field.name)
        if field.name in EXACT:
            changes[field.name] = EXACT[field.name]
        elif isinstance(value, Compressor):
            changes[field.name] = conserving_form(value)
        elif field.name == "rules":
            changes[field.name] = tuple((selector, conserving_form(inner)) for selector, inner in value)
    return dataclasses.replace(compressor, **changes)


def gradient(name: str, shape: Sequence[int], rank: int, step: int) -> Tensor:
    """float32, flat: what one rank has for one parameter in one step. Sizes differ between steps and ranks."""
    seed = zlib.crc32(f"{name}/{rank}/{step}".encode())
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(TensorSpec(name, tuple(shape)).numel, generator=generator)
    return values * (1.0 + rank + step % 3)


LAST_STEP = 8  # phases (warm-ups) of the configurations above are over by then


class Subject(NamedTuple):
    """What a case is about, before anything has run: a configuration under a layout on so many ranks."""

    name: str
    layout: LayoutName
    world_size: int

    @property
    def preset(self) -> Compressor:
        return CONFIGURATIONS[self.name]

    @property
    def compressor(self) -> Compressor:
        """The same with nothing exempt."""
        return everything(self.preset)

    def assignments(self, compressor: Compressor) -> Mapping[str, Assignment]:
        return assign_all(compressor.phase(LAST_STEP), SPECS)

    def lawful(self, compressor: Compressor) -> list[str]:
        """Parameters of which everything that came in has come out or is in a residual."""
        specs = {spec.name: dataclasses.replace(spec, sharded=self.layout == "fsdp") for spec in SPECS}
        return [name for name, a in self.assignments(compressor).items() if a.method.conserves(specs[name])]


class InvariantHarness:
    """One configuration under one layout on one rank."""

    def __init__(self, name: str, layout: LayoutName, comm: Comm, folder: Path | None = None) -> None:
        self.subject = Subject(name, layout, comm.world_size)
        self.layout = layout
        self.comm = comm
        self.folder = folder  # for checkpoints, the same on all ranks
        self.preset = self.subject.preset
        self.compressor = self.subject.compressor

    @property
    def world_size(self) -> int:
        return self.comm.world_size

    def sync(self, compressor: Compressor | None = None, **options: Any) -> GradientSync:
        sync = GradientSync(
            self.compressor if compressor is None else compressor,
            SPECS,
            Ranks.flat(self.comm),
            torch.device("cpu"),
            sharded=self.layout == "fsdp",
            seed=7,
            **options,
        )
        ByteCheck(sync)
        return sync

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
            sync.begin_step()
            stages.append(sync.reduce(layout, x, x))
            buffers.append((layout, x))
        _advance(stages)
        return {name: x[at : at + grads[name].numel()] for layout, x in buffers for name, at in layout.entries}

    def _scatter(self, sync: GradientSync, names: Sequence[str], grads: Grads, dtype: torch.dtype) -> Grads:
        world_size, rank = self.world_size, self.comm.rank
        rows = {name: dim0_row_numel(sync.specs[name].shape, world_size) for name in names}
        row_numel = sum(rows.values())
        x = torch.zeros(world_size, row_numel, dtype=dtype)
        entries, at = [], 0
        for name, row in rows.items():
            entries.append((name, at))
            padded = torch.nn.functional.pad(grads[name], (0, row * world_size - grads[name].numel()))
            x[:, at : at + row] = padded.view(world_size, row)
            at += row
        out = torch.full((row_numel,), 3.0, dtype=dtype)
        sync.begin_step()
        layout = BucketLayout(tuple(entries), row_numel, num_marked=len(names))
        _advance([sync.reduce(layout, x.view(-1), out)])
        out /= world_size
        return {name: out[at : at + row_length(grads[name].numel(), rows[name], rank)] for name, at in entries}

    def join(self, rows: Sequence[Grads]) -> Grads:
        """Whole means from what every rank holds."""
        if self.layout == "ddp":
            return rows[0]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def _ddp_bucket(names: Sequence[str], grads: Grads, dtype: torch.dtype, *, last: bool) -> tuple[BucketLayout, Tensor]:
    entries, at = [], 0
    for name in names:
        if grads[name].numel():  # as the hook does
            entries.append((name, at))
            at += grads[name].numel()
    x = torch.cat([grads[name] for name, _ in entries]).to(dtype)
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


class Case(NamedTuple):
    """One law: what every rank records, what must be true of it, and which subjects it applies to."""

    collect: Callable[[InvariantHarness], Evidence]
    check: Callable[[Sequence[Evidence], InvariantHarness], list[str]]
    applies: Callable[[Subject], bool] = lambda subject: True
    cut_matters: bool = False  # how many ranks there are decides where tensors are cut and sums are formed
