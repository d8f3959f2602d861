"""Small trainings with the real objects: DDP and FSDP2 with a compressed exchange, on the device that is there."""

from __future__ import annotations

import copy
import os
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.session import Session
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.comm import GroupComm, LocalComm, wait_for_all
from lowbit_strategy.custom_loop import LoopClock, adapt
from lowbit_strategy.engine.bucket import Bucket, BucketLayout
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.hooks.ddp import DDPHook
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.weight_codings import WeightCode
from lowbit_strategy.model.fsdp_sharding import ShardPolicy, shard_module
from lowbit_strategy.ranks.ranks import Ranks

VOCABULARY, LENGTH = 96, 32


class SmallGPT(nn.Module):
    """Embedding, causal transformer layers, output head."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = (width, 4, 4 * width, 0.0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(*layer, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(x)
        return logits


def batch(step: int, rank: int, device: torch.device) -> Tensor:
    """A learnable sequence: every token is the one before plus one of three strides."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start = torch.randint(VOCABULARY, (8, 1), generator=generator)
    stride = torch.randint(1, 4, (8, 1), generator=generator)
    return ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def apart(rank: int) -> None:
    """NCCL refuses two ranks on one GPU unless they seem to be on two machines."""
    os.environ |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}


def open_group(backend: str, rank: int, world_size: int, folder: str) -> None:
    if backend == "nccl":
        apart(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def wrap(
    kind: str,
    net: nn.Module,
    compressor: Compressor | None,
    device: torch.device,
    *,
    has_scaler: bool = False,
    check_digest: bool = True,
    bucket_cap_mb: float = 0.1,
) -> tuple[nn.Module, Session | None]:
    """DDP, or FSDP2 in place; without a compressor nothing is attached.

    FSDP2's weights travel in 8 bits whatever the compressor, as by default with LoCo: its change changes no weights.
    """
    prepared = None
    if compressor is not None:
        scatter = kind == "fsdp"
        sync_options = SyncOptions(weights=WeightCode() if scatter else None, check_digest=check_digest)
        prepared = prepare(net, compressor, sync_options, scatter=scatter)
    if kind == "ddp":
        model = DistributedDataParallel(net, bucket_cap_mb=bucket_cap_mb)
        return model, prepared and attach_ddp(model, prepared, device=device, has_scaler=has_scaler)
    if not isinstance(net, FSDPModule):
        shard_module(net, init_device_mesh(device.type, (dist.get_world_size(),)), ShardPolicy(min_numel=1))
    return net, prepared and attach_fsdp(net, prepared, device=device, has_scaler=has_scaler)


class BucketCount(StepListener):
    """Counts buckets, and can hold each up where it is about to be encoded: its stream (a CPU's thread) falls behind.

    Args:
        late: CUDA cycles to wait, on a CPU nanoseconds.
    """

    traces = False

    def __init__(self, device: torch.device, late: int = 0) -> None:
        self.device, self.late, self.count = device, late, 0

    def begin_step(self) -> BucketCount:
        return self

    def end_step(self, *, counted: bool) -> None:
        pass

    def observe(self, bucket: Bucket, x: Tensor, out: Tensor, stages: Stages) -> Stages:
        self.count += 1
        if self.late and self.device.type == "cuda":
            torch.cuda._sleep(self.late)
        elif self.late:
            time.sleep(self.late / 1e9)
        yield from stages

    def trace(self, name: str, compensated: Tensor, sent: Tensor) -> None:
        pass


class Training:
    """A small GPT on one of several ranks.

    Options: device, kind, compressor (None: plain DDP or FSDP2), scaler; ``sleep``: device cycles to wait before each
    backward pass; ``late``: see `BucketCount`; ``controller``: chooses the compressor.
    """

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        self.rank, self.device, self.scaler = rank, torch.device(options["device"]), options.get("scaler")
        self.sleep = options.get("sleep", 0)
        torch.manual_seed(0)
        self.net = SmallGPT().to(self.device)
        self.model, self.session = wrap(
            options["kind"],
            self.net,
            options["compressor"],
            self.device,
            has_scaler=self.scaler is not None,
            check_digest=options.get("check_digest", True),
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3, foreach=True)
        self.buckets = BucketCount(self.device, options.get("late", 0))
        self.driver = None
        if self.session is not None:
            self.sync = self.session.sync
            if options.get("late") or options.get("count"):
                self.sync.listeners.add(self.buckets, StepPhase.OBSERVE)
            if options.get("controller"):
                self.driver = adapt(self.sync, options["controller"], LoopClock(self.optimizer, options["steps"]))
        self.host_ms: list[float] = []

    def step(self, number: int, *, debug_sync: bool = False) -> Tensor:
        tokens = batch(number, self.rank, self.device)
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.float16, enabled=self.scaler is not None):
            loss = next_token_loss(self.model, tokens)
        if debug_sync:
            torch.cuda.set_sync_debug_mode("error")
        if self.sleep:
            torch.cuda._sleep(self.sleep)
        start = time.perf_counter()
        if self.session is not None:
            self.session.begin_step(self.scaler)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.host_ms.append(1e3 * (time.perf_counter() - start))
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.session is not None:
            self.session.end_step(scaler=self.scaler)
        if debug_sync:
            torch.cuda.set_sync_debug_mode("default")
        return loss.detach()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()


def start(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> None:
    device = torch.device(options["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    open_group(options["backend"], rank, world_size, folder)


def train(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Some steps; losses, a digest of the parameters, host time.

    Options: those of `Training`, backend, steps; ``debug_sync``: an error if a step makes the host wait.
    """
    start(rank, world_size, folder, options)
    training = Training(rank, options)
    debug = options.get("debug_sync", False)
    losses = [training.step(step, debug_sync=debug and step > 3) for step in range(options["steps"])]
    middle = sorted(training.host_ms)[len(losses) // 2]
    figures = {"losses": [float(loss) for loss in losses], "digest": digest(training.net), "backward_host_ms": middle}
    figures |= {"sent_nbytes": training.sync.ranks.peers.sent_nbytes, "buckets": training.buckets.count}
    figures["switches"] = sum(event.step > 0 for event in training.driver.events) if training.driver else 0
    training.close()
    return figures


def digest(net: nn.Module) -> int:
    total = 0
    for parameter in net.parameters():
        values = parameter.detach()
        values = values.full_tensor() if isinstance(values, DTensor) else values
        total = zlib.crc32(values.cpu().contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total


def one_rank_matches(device: torch.device, dtype: str, options: dict[str, bool]) -> None:
    """Three steps of DDP on one rank against the engine alone, on the gradients of a copy of the model.

    Raises:
        AssertionError: A bit differs.
    """
    net = nn.Sequential(nn.Linear(96, 130), nn.ReLU(), nn.Linear(130, 70)).to(device, getattr(torch, dtype))
    plain, scale = copy.deepcopy(net), 1024.0 if dtype == "float16" else 1.0
    prepared = prepare(net, LoCo(), SyncOptions(), scatter=False)
    model = DistributedDataParallel(net, bucket_cap_mb=0.01, **options)  # type: ignore[arg-type]
    # `attach_ddp` leaves one rank uncompressed, so the hook is put on by hand, with a group apart from DDP's.
    comm = GroupComm(dist.new_group([0]))
    hooked = GradientSync(LoCo(), prepared.specs, Ranks.flat(comm), device, sharded=False)
    hook = DDPHook(model, hooked)
    alone = GradientSync(LoCo(), prepared.specs, Ranks.flat(LocalComm()), device, sharded=False)
    for step in range(3):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step)).to(device, getattr(torch, dtype))
        for sync in (hooked, alone):
            sync.begin_step(scale)
        for module in (model, plain):
            module.zero_grad(set_to_none=not options.get("gradient_as_bucket_view"))
            (module(x).float().square().mean() * scale).backward()
        hooked.end_step()
        wanted = _reduce(alone, plain)
        for (name, parameter), gradient in zip(net.named_parameters(), wanted, strict=True):
            assert parameter.grad is not None
            if not torch.equal(parameter.grad, gradient.view_as(parameter)):
                raise AssertionError(f"step {step}: the gradient of {name} differs ({dtype}, {options})")
    hook.close()


def _reduce(sync: GradientSync, model: nn.Module) -> list[Tensor]:
    gradients = [parameter.grad.reshape(-1) for parameter in model.parameters() if parameter.grad is not None]
    entries, at = [], 0
    for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
        entries.append((name, at))
        at += gradient.numel()
    x = torch.cat(gradients)
    sync.begin_step()
    wait_for_all(sync.reduce(BucketLayout(tuple(entries)), x, x))
    sync.end_step()
    return list(x.split([gradient.numel() for gradient in gradients]))
