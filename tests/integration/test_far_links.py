"""Far links: other messages, the same bits. What is slow there is measured in ``benchmarks/network.py --delay``."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo, TopK
from lowbit_strategy.attach.attach import attach_ddp, attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.collectives.transports.far_comm import FarComm
from lowbit_strategy.telemetry.startup_report import build_report
from testing.processes.scenarios import Facts, scenarios
from testing.training.comparing import checksum, fingerprint
from testing.training.regression import Kind, Regression, loader, strategy, trainer

SETTINGS: dict[str, tuple[Kind, Any, dict[str, Any]]] = {
    "ddp": ("ddp", LoCo(block_size=32), {}),
    "ddp, sparse": ("ddp", TopK(density=0.1), {}),
    "fsdp": ("fsdp", LoCo(block_size=32), {}),
    "fsdp, differences": ("fsdp", LoCo(block_size=32), {"weights": "delta4"}),
    "fsdp, exact weights": ("fsdp", LoCo(block_size=32), {"weights": "exact"}),
    "hsdp": ("hsdp", LoCo(block_size=32), {}),
}


def near_and_far(folder: Path, setting: str) -> Facts:
    kind, compressor, options = SETTINGS[setting]
    runs = {}
    for far in (False, True):
        torch.manual_seed(0)
        model = Regression()
        made = trainer(strategy(kind, compressor, far_links=far, **options), max_steps=8, accumulate_grad_batches=2)
        made.fit(model, loader())
        sync = made.strategy.sync
        peers, weights = sync.ranks.peers, sync.weights
        assert isinstance(peers, FarComm) == far
        runs["far" if far else "near"] = {
            "losses": model.losses,
            "print": fingerprint(model),
            "residuals": [checksum([r]) for name in sync.specs if (r := sync.state.residual(name)) is not None],
            "sent": peers.sent_nbytes,
            "weights": None if weights is None else (weights.comm.sent_nbytes, weights.step_nbytes),
        }
    return runs


@scenarios(near_and_far, setting=tuple(SETTINGS))
def test_the_same_bits_and_bytes(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["near"]["residuals"]
        assert rank["near"] == rank["far"]


class WaitsCounted(Regression):
    """Notes every collective that a step waits for, from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.patches = contextlib.ExitStack()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            for name in COLLECTIVES:
                counted = functools.partial(self.counted, name, getattr(dist, name))
                self.patches.enter_context(mock.patch.object(dist, name, counted))

    def on_train_end(self) -> None:
        self.patches.close()

    def counted(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            self.waits.append(name)
        return original(*args, **kwargs)


COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single", "barrier"),
    *("broadcast", "broadcast_object_list", "gather_object", "monitored_barrier", "reduce_scatter_tensor"),
)


def waits(folder: Path, kind: Kind) -> Facts:
    model = WaitsCounted()
    made = trainer(strategy(kind, far_links=True), max_steps=8)
    made.fit(model, loader())
    return {"waits": model.waits, "steps": made.global_step}


@scenarios(waits, kind=("ddp", "fsdp", "hsdp"))
def test_a_step_waits_for_its_gradients_and_weights_alone(facts: list[Facts]) -> None:
    """Signals, flags and digests travel beside them."""
    for rank in facts:
        assert rank == {"waits": [], "steps": 8}


def memory(folder: Path, kind: Kind) -> Facts:
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    prepared = prepare(net, LoCo(), SyncOptions(far_links=True), scatter=kind == "fsdp")
    if kind == "fsdp":
        for module in (*net, net):
            fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        session = attach_fsdp(net, prepared, device=torch.device("cpu"))
        model: nn.Module = net
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.25)
        session = attach_ddp(model, prepared)
    sync = session.sync
    for _ in range(40):  # receives of the sizes before DDP cut its buckets anew have been given up by then
        session.begin_step()
        model(torch.randn(4, 256)).square().mean().backward()
        session.end_step()
    assert isinstance(sync.ranks.peers, FarComm)
    facts = {"gradients": sync.buffers.nbytes, "ahead": sync.ranks.peers.ahead_nbytes}
    facts["announced"] = build_report(sync).buffer_nbytes
    if sync.weights is not None:
        facts["weights"] = sync.weights.buffers.nbytes
        facts["weights ahead"] = sync.weights.comm.ahead_nbytes
        whole = sum(4 * spec.numel for spec in sync.specs.values())
        facts["while backward goes on"] = whole + whole // dist.get_world_size()
    session.close()
    facts["after the end"] = sync.ranks.peers.ahead_nbytes
    return facts


@scenarios(memory, kind=("ddp", "fsdp"))
def test_memory_is_announced(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank.pop("after the end") == 0
        announced = rank.pop("announced")
        assert min(rank.values()) > 0
        assert 0.75 * announced <= sum(rank.values()) <= announced
