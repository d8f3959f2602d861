"""Two levels of ranks: exact inside a node, compressed between nodes, on four processes that stand for two nodes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lowbit_strategy import LoCo
from lowbit_strategy.accelerate import LowBitPlugin
from lowbit_strategy.control import GraVAC
from lowbit_strategy.custom_loop import compress
from lowbit_strategy.lightning import AdaptiveCompression, CompressionMonitor, LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.plan.running import plan_of
from testing.log import listen
from testing.processes.node_size import nodes_of
from testing.processes.scenarios import Facts, all_but, raised, scenarios
from testing.record import read_record
from testing.training.accelerated import make, prepared, train
from testing.training.comparing import fingerprint, full_parameters
from testing.training.regression import (
    OUTPUTS,
    WIDTH,
    ByStep,
    Kind,
    Regression,
    SteadyTime,
    dataset,
    fit,
    loader,
    mlp,
    strategy,
    trainer,
)

BOTH: tuple[Kind, ...] = ("ddp", "fsdp")


def by_name(folder: Path, kind: Kind) -> Facts:
    runs: dict[str, Any] = {}
    with nodes_of(2):
        for name in ("ddp", f"dense_{kind}", f"loco_{kind}"):
            torch.manual_seed(0)
            model = Regression()
            with listen() as lines:
                made = trainer(name, max_steps=8)
                made.fit(model, loader())
            runs[name] = {"losses": model.losses, "values": {k: v.tolist() for k, v in full_parameters(model).items()}}
    sync = made.strategy.sync
    return {
        "stock": runs["ddp"],
        "dense": runs[f"dense_{kind}"],
        "losses": runs[f"loco_{kind}"]["losses"],
        "print": fingerprint(model),
        "leaving": 0.0 if sync.weights is None else sync.weights.comms[0].between_nodes(12) / 12,
        "peers": sync.ranks.peers.world_size,
        "world_size": sync.ranks.world_size,
        "sent": sync.ranks.peers.sent_nbytes,
        "accounted": 8 * sum(sync.state.sent_nbytes(name) for name in sync.specs),
        "sent_inside": sync.ranks.intra_node.sent_nbytes,
        "planned_inside": 8 * plan_of(sync).intra_node_nbytes,
        "residual": sync.state.nbytes,
        "numel": sum(spec.numel for spec in sync.state.full_specs.values()),
        "log": lines,
    }


@scenarios(by_name, world_size=4, kind=BOTH)
def test_by_name(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["print"] == facts[0]["print"]
        assert (rank["peers"], rank["world_size"]) == (2, 4)
        assert rank["leaving"] in (0.0, 1 / 3)  # weights travel to the other node once
        assert rank["losses"][-1] < 0.8 * rank["losses"][0]
        for name, values in rank["stock"]["values"].items():
            torch.testing.assert_close(torch.tensor(rank["dense"]["values"][name]), torch.tensor(values))
        headers_and_padding = 20 * 2 * 3 * (16 + 6 * 15)
        assert rank["accounted"] < rank["sent"] <= rank["accounted"] + headers_and_padding
        assert rank["sent_inside"] == rank["planned_inside"] > 0
        assert rank["residual"] < 1.2 * rank["numel"]  # an int8 per element, a half of it, and the downlink's half
    log = "\n".join(facts[0]["log"])
    assert "over 2 groups of 2 ranks, exact inside a group" in log
    assert "between nodes" in log


class Run(NamedTuple):
    """What a run has come to; `decided`: the controller's levels, by parameter."""

    losses: list[float]
    bits: int
    decided: dict[str, int]


class Resumed(NamedTuple):
    """A run, the same from a checkpoint in its middle, and one that goes on from there on one level."""

    whole: Run
    again: Run
    flat: Run
    flat_peers: int
    log: str
    observed: list[dict[str, Any]]


def resume(folder: Path, kind: Kind) -> Resumed:
    """With a monitor and a controller, whose decisions all ranks share; then on one level, residuals folded."""
    runs = []
    controller = {"window": 2, "epsilon": 0.2, "settle": 0, "omega": 0.0}
    with nodes_of(2):
        for start in (None, folder / "step=4.ckpt"):
            saver = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
            levels = tuple(LoCo(bits=bits, block_size=32) for bits in (8, 4, 2))
            adaptive = AdaptiveCompression(GraVAC(candidates=levels, **controller), record=False)
            monitor = CompressionMonitor(every_n_steps=2, record=folder / str(start is None))
            callbacks = [adaptive, SteadyTime(adaptive), monitor, saver]
            model = ByStep()
            made = trainer(strategy(kind), max_steps=9, enable_checkpointing=True, callbacks=callbacks)
            made.fit(model, loader(), ckpt_path=start)
            runs.append(Run(model.losses, fingerprint(model), dict(adaptive.driver.levels)))
        flat = ByStep()
        with listen() as lines:
            one = fit_from(folder / "step=4.ckpt", kind, flat, two_level=False, on_world_size_change="fold")
    records = read_record(folder / "True") if made.global_rank == 0 else []
    return Resumed(
        *runs,
        flat=Run(flat.losses, fingerprint(flat), {}),
        flat_peers=one.strategy.sync.ranks.peers.world_size,
        log="\n".join(lines),
        observed=[line for line in records if line["kind"] == "observation"],
    )


def fit_from(path: Path, kind: Kind, model: ByStep, **options: Any) -> Any:
    made = trainer(strategy(kind, **options), max_steps=9)
    made.fit(model, loader(), ckpt_path=path)
    return made


@scenarios(resume, world_size=4, kind=BOTH, slow=all_but(kind="ddp"))
def test_resume_with_a_monitor_and_a_controller(facts: list[Resumed]) -> None:
    for rank in facts:
        assert rank.again.losses == rank.whole.losses[4:]
        assert rank.again.bits == rank.whole.bits == facts[0].whole.bits
        assert rank.again.decided == rank.whole.decided == facts[0].whole.decided
        assert rank.flat.bits == facts[0].flat.bits
        assert rank.flat_peers == 4
        assert rank.flat.losses[0] == rank.whole.losses[4]
    assert "grouped into other nodes or replicas: compression residuals are averaged" in facts[0].log
    assert "one level, because two_level=False" in facts[0].log
    for line in facts[0].observed:
        assert line["between_nbytes"] == line["sent_nbytes"] > 0
        assert line["inside_nbytes"] > line["between_nbytes"]


def refused(folder: Path) -> Facts:
    facts: Facts = {}
    with nodes_of(4):
        facts["one node"] = raised(lambda: fit("ddp", Regression(), options={"two_level": True}, max_steps=1))
    facts["both"] = raised(lambda: LowBitFSDPStrategy(LoCo(), two_level=True, shard_size=2))
    uneven = 3 if torch.distributed.get_rank() < 3 else 1
    with nodes_of(uneven), listen() as lines:
        fit("ddp", Regression(), max_steps=2)
    facts["uneven"] = "\n".join(lines)
    with nodes_of(2):
        differs = torch.distributed.get_rank() == 1
        facts["differs"] = raised(lambda: fit("fsdp", Regression(), options={"two_level": False if differs else None}))
        facts["fabric"] = with_fabric()
        facts["accelerate"] = with_accelerate()
    return facts


class Trained(NamedTuple):
    bits: int
    peers: int


def with_fabric() -> Trained:
    made = L.Fabric(accelerator="cpu", devices=4, strategy="loco2_ddp")
    made.launch()
    net = mlp()
    model, optimizer = made.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
    for step in range(4):
        x, y = dataset()[(4 * step + made.global_rank) * 4 :][:4]
        made.backward(F.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(fingerprint(net), made.strategy.sessions[0].sync.ranks.peers.world_size)


def with_accelerate() -> Trained:
    job = prepared(make("ddp", LowBitPlugin("topk")))
    train(job, 3, clip=1.0)
    return Trained(fingerprint(job.model), job.sync.ranks.peers.world_size)


@scenarios(refused, world_size=4)
def test_what_cannot_have_two_levels_and_other_frameworks(facts: list[Facts]) -> None:
    for rank in facts:
        assert "two_level=True is not possible, because all ranks are on one node" in rank["one node"]
        assert "two_level must not be given with shard_size" in rank["both"]
        assert "rank 1 differs from rank 0 in two_level: False instead of None" in rank["differs"]
        assert rank["fabric"] == Trained(facts[0]["fabric"].bits, peers=2)
        assert rank["accelerate"] == Trained(facts[0]["accelerate"].bits, peers=2)
    assert "one level, because nodes have different numbers of ranks (3, 1)" in facts[0]["uneven"]


class Coded(NamedTuple):
    """What a training with or without codes inside nodes has come to; bytes are those inside."""

    losses: list[float]
    bits: int
    sent: int
    planned: int


def with_intra(kind: Kind, **options: Any) -> LowBitDDPStrategy | LowBitFSDPStrategy:
    if kind == "ddp":
        return LowBitDDPStrategy(LoCo(), bucket_cap_mb=0.1, **options)
    shard_size = "node" if kind == "hsdp" else None
    return LowBitFSDPStrategy(LoCo(), min_shard_numel=20_000, shard_size=shard_size, weights="exact", **options)


def codes_inside(folder: Path, kind: Kind) -> Facts:
    runs: dict[str, Coded] = {}
    with nodes_of(2):
        for intra in (None, 8):
            torch.manual_seed(0)
            widths = itertools.pairwise((WIDTH, 256, 256, OUTPUTS))
            layers = [layer for width in widths for layer in (nn.Linear(*width), nn.Tanh())][:-1]
            model = Regression(nn.Sequential(*layers), lr=1e-3)
            with listen() as lines:
                made = trainer(with_intra(kind, intra=intra), max_steps=8)
                made.fit(model, loader())
            sync = made.strategy.sync
            runs[str(intra)] = Coded(
                model.losses,
                fingerprint(model),
                sent=sync.ranks.intra_node.sent_nbytes,
                planned=8 * plan_of(sync).intra_node_nbytes,
            )
    return {**runs, "log": "\n".join(lines)}


@scenarios(codes_inside, world_size=4, kind=("ddp", "fsdp", "hsdp"), slow=all_but(kind=("ddp", "hsdp")))
def test_codes_inside_nodes(facts: list[Facts], request: pytest.FixtureRequest) -> None:
    """Two nodes of two ranks: a quarter of the bytes of an exact reduce-scatter, and the same losses within noise."""
    for rank in facts:
        exact, coded = rank["None"], rank["8"]
        assert coded.bits == facts[0]["8"].bits
        assert coded.bits != exact.bits
        assert coded.losses[-1] < 0.8 * coded.losses[0]
        torch.testing.assert_close(torch.tensor(coded.losses), torch.tensor(exact.losses), rtol=0.1, atol=1e-3)
        assert (exact.sent, coded.sent) == (exact.planned, coded.planned)
        gathered = exact.sent // 2 if "ddp" in request.node.name else 0  # which stays as it is
        assert 0.25 < (coded.sent - gathered) / (exact.sent - gathered) < 0.3
    assert "2 groups of 2 ranks, 8-bit codes inside a group" in facts[0]["log"]
    assert "of gradients, summed from 8-bit codes" in facts[0]["log"]


def without_codes(folder: Path) -> Facts:
    def error(kind: Kind, **options: Any) -> str:
        return raised(lambda: trainer(with_intra(kind, **options), max_steps=1).fit(Regression(), loader()))

    facts: Facts = {"bits": raised(lambda: LowBitDDPStrategy(intra=4))}
    with nodes_of(4):
        facts["one node"] = error("ddp", intra=8)
        facts["one replica"] = error("hsdp", intra=8)
    with nodes_of(2):
        facts["one level"] = error("fsdp", intra=8, two_level=False)
        facts["outer"] = error("ddp", intra=8, outer="diloco")
        facts["one rank"] = raised(
            lambda: trainer(LowBitFSDPStrategy(shard_size=1, intra=8), max_steps=1).fit(Regression(), loader())
        )
        facts["differs"] = error("fsdp", intra=8 if torch.distributed.get_rank() == 1 else None)
    return facts


@scenarios(without_codes, world_size=4)
def test_where_there_are_no_sums_inside_a_node(facts: list[Facts]) -> None:
    for rank in facts:
        assert "intra must be 8, for codes of 8 bits inside a node, or None, got 4" in rank["bits"]
        assert "intra=8 is not possible, because all ranks are on one node" in rank["one node"]
        assert "intra=8 is not possible, because all ranks share one model" in rank["one replica"]
        assert "intra=8 is not possible, because two_level=False" in rank["one level"]
        assert "intra=8 is not possible, because under DDP ranks take separate local steps" in rank["outer"]
        assert "intra=8 is not possible, because one rank has a whole model (shard_size=1)" in rank["one rank"]
        assert "rank 1 differs from rank 0 in intra: 8 instead of None" in rank["differs"]


def empty_parts(folder: Path, far: bool, compressor: str) -> Facts:
    """Of a parameter with one row only the first rank of a node has a part; here it is a bucket by itself."""
    values: Facts = {}
    with nodes_of(2):
        for name in ("stock", compressor):
            torch.manual_seed(0)
            net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 1), nn.Linear(1, 64))
            model = DistributedDataParallel(net, bucket_cap_mb=1e-4)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            if name != "stock":
                session = compress(model, optimizer, name, two_level=True, far_links=far)
            for step in range(4):
                x = torch.randn(4, 64, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            values[name] = torch.cat([param.detach().reshape(-1) for param in net.parameters()]).tolist()
        session.finish()
        session.close()
    return values


@scenarios(empty_parts, world_size=4, far=(False, True), compressor=("dense", "topk"))
def test_empty_parts(facts: list[Facts]) -> None:
    assert all(rank == facts[0] for rank in facts)
    if "dense" in facts[0]:
        assert facts[0]["dense"] == pytest.approx(facts[0]["stock"], rel=1e-4, abs=1e-6)
