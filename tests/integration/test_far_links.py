"""Far links between two hosts, of one rank each or of two: other messages, the same bits.

What is slow there is measured in ``benchmarks/network.py --delay``.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import Auto, LoCo, TopK, WeightCode, WeightDelta
from lowbit_strategy.attach.ddp import attach_ddp
from lowbit_strategy.attach.fsdp import attach_fsdp
from lowbit_strategy.attach.prepare import prepare
from lowbit_strategy.attach.sync_options import SyncOptions
from lowbit_strategy.far_links.far_comm import FarComm
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.plan.running import plan_of
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, all_but, scenarios
from testing.training.auto import STEPS, settled
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
    with nodes_of(dist.get_world_size() // 2):
        return _near_and_far(*SETTINGS[setting])


def _near_and_far(kind: Kind, compressor: Any, options: dict[str, Any]) -> Facts:
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
            "weights": None if weights is None else (weights.comms[0].sent_nbytes, weights.step_nbytes),
        }
    return runs


def _of_four(world_size: int, **_: object) -> bool:
    return world_size == 4


@scenarios(
    near_and_far,
    world_size=(2, 4),
    slow=all_but(world_size=2, setting=("ddp", "fsdp", "hsdp")),
    setting=tuple(SETTINGS),
)
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
    with nodes_of(dist.get_world_size() // 2):
        made = trainer(strategy(kind, far_links=True), max_steps=8)
        made.fit(model, loader())
    return {"waits": model.waits, "steps": made.global_step}


@scenarios(waits, world_size=(2, 4), slow=_of_four, kind=("ddp", "fsdp", "hsdp"))
def test_a_step_waits_for_its_gradients_and_weights_alone(facts: list[Facts]) -> None:
    """Signals, flags and digests travel beside them."""
    for rank in facts:
        assert rank == {"waits": [], "steps": 8}


def threads(folder: Path, chosen: str) -> Facts:
    """Which threads have sent gradients in the last steps."""
    names: list[str] = []
    compressor = Auto() if chosen == "by the package" else LoCo(block_size=32)
    original = FarComm.all_to_all

    def noted(self: FarComm, *args: Any) -> Any:
        names.append(threading.current_thread().name)
        return original(self, *args)

    with nodes_of(dist.get_world_size() // 2), settled(0, tries=1), mock.patch.object(FarComm, "all_to_all", noted):
        made = trainer(strategy("fsdp", compressor, far_links=True), max_steps=STEPS)
        made.fit(Regression(), loader(96 * 12))
    return {"threads": set(names[-6:]), "sent": made.strategy.sync.ranks.peers.sent_nbytes}


@scenarios(
    threads,
    world_size=(2, 4),
    slow=all_but(world_size=2, chosen="by the package"),
    chosen=("by the user", "by the package"),
)
def test_gradients_of_fsdp_travel_while_backward_goes_on(facts: list[Facts]) -> None:
    """By a thread of their own, also where the package has chosen their compression."""
    for rank in facts:
        assert rank["threads"] == {"lowbit-buckets"}
        assert rank["sent"] > 0


def codings(folder: Path) -> Facts:
    """The package tries weights as codes, as differences, and takes codes again: each time with a new communicator."""
    options: Any = {"tries": 2, "weights": (WeightCode(), WeightDelta(bits=4))}
    with nodes_of(dist.get_world_size() // 2), settled(0, **options):
        made = trainer(strategy("fsdp", Auto(), far_links=True), max_steps=STEPS)
        made.fit(model := Regression(), loader(96 * 12))
        weights = made.strategy.sync.weights
    return {"steps": made.global_step, "chosen": weights.coding.name, "print": fingerprint(model)}


@scenarios(codings, world_size=(2, 4), slow=_of_four)
def test_weights_may_travel_in_several_ways_one_after_the_other(facts: list[Facts]) -> None:
    """Receives that one way had posted ahead took the messages of the next, and ranks waited for ever."""
    for rank in facts:
        assert rank == {"steps": STEPS, "chosen": WeightCode.name, "print": facts[0]["print"]}


def memory(folder: Path, kind: Kind) -> Facts:
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    num_ranks = dist.get_world_size()
    with nodes_of(num_ranks // 2):
        prepared = prepare(net, LoCo(), SyncOptions(far_links=True), scatter=kind == "fsdp")
    if kind == "fsdp":
        for module in (*net, net):
            fully_shard(module, mesh=init_device_mesh("cpu", (num_ranks,)))
        session = attach_fsdp(net, prepared, device=torch.device("cpu"))
        model: nn.Module = net
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.25)
        session = attach_ddp(model, prepared)
    sync = session.sync
    for _ in range(40):  # receives of the sizes before DDP cut its buckets again have been given up by then
        session.begin_step()
        model.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()
        session.end_step()
    assert isinstance(sync.ranks.peers, FarComm)
    facts = {"gradients": sync.buffers.nbytes, "ahead": sync.ranks.peers.ahead_nbytes}
    facts["announced"] = memory_of(plan_of(sync)).temporary
    if sync.weights is not None:
        facts["weights"] = sync.weights.buffers.nbytes
        between = sync.weights.comms[0].between
        assert isinstance(between, FarComm)
        facts["weights ahead"] = between.ahead_nbytes
        whole = sum(4 * spec.whole.numel for spec in sync.specs.values())
        # on two levels FSDP2's own gradients are gone; the means of the node's ranks wait, and one module is received
        inside = {2: 0, 4: 4 * (256 + 1) * 256}
        facts["while backward goes on"] = whole // (num_ranks // 2) + whole // num_ranks + inside[num_ranks]
    session.close()
    facts["after the end"] = sync.ranks.peers.ahead_nbytes
    return facts


@scenarios(memory, kind=("ddp",))
def test_memory_is_announced(facts: list[Facts]) -> None:
    check_announced(facts)


@pytest.mark.slow
@scenarios(memory, world_size=(2, 4), kind=("fsdp",))
def test_memory_of_fsdp_is_announced(facts: list[Facts]) -> None:
    check_announced(facts)


def check_announced(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank.pop("after the end") == 0
        announced = rank.pop("announced")
        assert min(rank.values()) > 0
        assert 0.75 * announced <= sum(rank.values()) <= announced
