"""One short training on one rank, and the most memory that it took: with compression, or as the framework has it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy.attach.constructors import policy_of
from lowbit_strategy.custom_loop import Session, SyncOptions, attach_ddp, attach_fsdp, prepare
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.hooks.bucket_cap import default_bucket_cap_mb
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_module
from lowbit_strategy.plan.messages import step_nbytes
from lowbit_strategy.plan.running import plan_of
from recipes.gpt import GPT, VOCABULARY
from testing.counting.allocations import allocated, peak, reset_peak
from testing.processes.node_size import nodes_of

WIDTH, DEPTH, HEADS, CONTEXT = 256, 16, 4, 32
STEPS = 5
Kind = Literal["ddp", "fsdp", "hsdp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set-up.

    Args:
        name: For the table.
        kind: What wraps the model.
        compressor: None: as the framework has it.
        options: Of `SyncOptions`, as they are given.
        world_size: Ranks.
        per_node: As if so many ranks shared a node; None: all.
        precision: As a trainer's.
        batches: Micro-batches of a step.
        accumulate: FSDP2: how.
    """

    name: str
    kind: Kind
    compressor: Compressor | None = None
    options: tuple[tuple[str, Any], ...] = ()
    world_size: int = 2
    per_node: int | None = None
    precision: str = "32-true"
    batches: int = 1
    accumulate: Literal["local", "reduce"] = "reduce"

    @property
    def stock(self) -> Case:
        """What it is compared with."""
        return Case(
            name=f"stock {self.kind}",
            kind=self.kind,
            world_size=self.world_size,
            per_node=self.per_node if self.kind == "hsdp" else None,
            precision=self.precision,
            batches=self.batches,
        )


def run(rank: int, world_size: int, cases: Sequence[Case], device_type: str) -> list[dict[str, Any]]:
    """On every rank, of each case: the most bytes beyond those before the model was made, and what was planned."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return [_measured(case, device) for case in cases]


def _measured(case: Case, device: torch.device) -> dict[str, Any]:
    with nodes_of(case.per_node or case.world_size):
        _train(case, device, steps=1)  # kernels are loaded, connections and tables made
        before = allocated(device)
        found = _train(case, device, steps=STEPS)
    return {**found, "peak": found["peak"] - before}


def _train(case: Case, device: torch.device, *, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    with device:
        net = GPT(WIDTH, DEPTH, HEADS, CONTEXT)
    model, session = _wrap(case, net, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if session is not None:
        session.bind(lambda: [optimizer], lambda: None)
    gc.collect()
    reset_peak(device)
    for step in range(steps):
        for batch in range(case.batches):
            with _waiting(case, model, last=batch == case.batches - 1):
                if session is not None:
                    session.begin_step()
                _loss(case, model, step, device).backward()
        optimizer.step()
        if session is not None:
            session.end_step(optimizer)
        optimizer.zero_grad()
    found: dict[str, Any] = {"peak": peak(device), "parameters": sum(each.numel() for each in net.parameters())}
    if session is not None:
        memory = memory_of(plan_of(session.sync))
        found["memory"] = asdict(memory)
        found["beyond"] = memory.total
        if case.accumulate == "local":  # in the place of the shard that stock keeps
            found["beyond"] += memory.accumulating * (1 - 1 / case.world_size)
        weights = session.sync.weights
        found["held"] = {
            "residuals": session.sync.state.nbytes,
            "messages": session.sync.buffers.nbytes + (0 if weights is None else weights.buffers.nbytes),
            "weights": 0 if weights is None else sum(each.kept_nbytes for each in weights.modules.values()),
        }
        found["weights_nbytes"] = None if weights is None else weights.step_nbytes
        found["planned_weights_nbytes"] = None if weights is None else step_nbytes(plan_of(session.sync).weights)
        session.close()
    return found


def _wrap(case: Case, net: nn.Module, device: torch.device) -> tuple[nn.Module, Session | None]:
    scatter, world_size = case.kind != "ddp", dist.get_world_size()
    options = dict(case.options)
    if case.kind == "hsdp":
        options["shard_size"] = case.per_node
    prepared = None
    if case.compressor is not None:
        prepared = prepare(net, case.compressor, SyncOptions(**options), scatter=scatter)
    if case.kind == "ddp":
        own = None if device.type == "cpu" else [device]
        model = DistributedDataParallel(net, own, bucket_cap_mb=default_bucket_cap_mb(device))
        return model, prepared and attach_ddp(model, prepared, device=device)
    shape = (world_size,) if case.kind == "fsdp" else (world_size // (case.per_node or 1), case.per_node or 1)
    mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    shard_module(net, mesh, ShardPolicy(min_numel=10_000, mp_policy=policy_of(case.precision)))
    return net, prepared and attach_fsdp(net, prepared, device=device)


@contextlib.contextmanager
def _waiting(case: Case, model: nn.Module, *, last: bool) -> Iterator[None]:
    """A micro-batch that is not the last: nothing is sent, where that is how it is accumulated."""
    if last or (case.kind != "ddp" and case.accumulate == "reduce"):
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        sharded = [child for child in model.modules() if isinstance(child, FSDPModule)]
        for child in sharded:
            child.set_requires_gradient_sync(False, recurse=False)
        yield
        for child in sharded:
            child.set_requires_gradient_sync(True, recurse=False)


def _loss(case: Case, model: nn.Module, step: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(VOCABULARY, (2, CONTEXT + 1), generator=generator).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bf16-mixed"):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
