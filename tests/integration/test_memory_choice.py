"""`memory=` under real strategies: the same choice on all ranks, named in the log, and a training that learns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit_strategy import Auto, LoCo, WeightCode
from lowbit_strategy.custom_loop import Session, compress
from lowbit_strategy.fitting.memory import memory_of
from lowbit_strategy.fitting.ways import Setup, memory_options
from lowbit_strategy.lightning import LowBitDDPStrategy, LowBitFSDPStrategy
from lowbit_strategy.methods._base.compressor import assign_all
from lowbit_strategy.plan.running import plan_of
from testing.log import listen
from testing.processes.scenarios import Facts, raised, scenarios
from testing.training.comparing import fingerprint
from testing.training.meshes import LOCO, wrapped
from testing.training.regression import WIDTH, Regression, loader, trainer

HIDDEN = 256
BLOCKS = 40


class Added(nn.Linear):
    """Added to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(super().forward(x))


def deep() -> nn.Sequential:
    """Many small modules: what is kept between steps is much more than what one of them needs for a moment."""
    return nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), *(Added(HIDDEN, HIDDEN) for _ in range(BLOCKS)), nn.Linear(HIDDEN, 8)
    )


def limited(folder: Path) -> Facts:
    numel = sum(param.numel() for param in deep().parameters())
    facts: Facts = {"numel": numel}
    totals: list[int] = []
    for memory, which in ((None, None), ("gathered", 2), ("none", 3)):  # before them: residuals are not copied
        torch.manual_seed(0)
        model = Regression(deep())
        memory_gb = None if which is None else (totals[which] + 1) / 1e9
        strategy = LowBitFSDPStrategy(LoCo(), memory=memory_gb, min_shard_numel=HIDDEN**2)
        with listen() as lines, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = trainer(strategy, max_steps=12)
            made.fit(model, loader())
        sync = made.strategy.sync
        if which is None:
            made_plan = plan_of(sync)
            specs = tuple(spec.whole for spec in made_plan.specs.values())
            where = Setup(specs=specs, topology=made_plan.topology, wrapper="fsdp", modules=made_plan.modules)
            found = memory_options(LoCo(), WeightCode(), where, may_recode=True)
            totals = [each.memory.total for each in found]
        facts[memory] = {
            "losses": model.losses,
            "print": fingerprint(model),
            "residual": sync.state.nbytes / numel,
            "kept": memory_of(plan_of(sync)).weights / numel,
            "warned": [str(each.message) for each in caught if "without its residual" in str(each.message)],
            "log": [line for line in lines if "to fit into" in line],
        }
    small = LowBitDDPStrategy(LoCo(), memory=1e-6)
    facts["error"] = raised(lambda: trainer(small, max_steps=1).fit(Regression(deep()), loader()))
    return facts


@pytest.mark.slow
@scenarios(limited, world_size=4)
def test_less_is_kept_and_the_loss_stays(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank[None]["residual"] > 0.9
        assert rank[None]["kept"] > 0.9
        assert rank[None]["log"] == []
        assert rank["gathered"]["residual"] == rank[None]["residual"]
        assert rank["gathered"]["kept"] == 0
        assert rank["none"]["residual"] == rank["none"]["kept"] == 0
        for memory in (None, "gathered", "none"):
            assert rank[memory]["print"] == facts[0][memory]["print"]
            assert sum(rank[memory]["losses"][-6:]) < 1.1 * sum(rank[None]["losses"][-6:])
        assert "compression would keep" in rank["error"]
    assert [len(facts[0][memory]["warned"]) for memory in (None, "gathered", "none")] == [0, 0, 1]
    assert "to keep it give memory=0.00" in facts[0]["none"]["warned"][0]
    assert "gathered again in backward" in facts[0]["gathered"]["log"][0]
    assert "no residual is kept" in facts[0]["none"]["log"][0]


def everyones(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def between(totals: Any) -> float:
    """A limit in GB that the smaller parts are within."""
    least, most = min(everyones(totals)), max(everyones(totals))
    assert least < most
    return (least + most) / 2e9


def uneven(folder: Path) -> Facts:
    """Tensor-parallel parts of 33 and 32 rows, and limits that some ranks are within by themselves."""

    def attach(memory: float | None = None) -> Session:
        run = wrapped("fsdp", hidden=65)
        return compress(run.model, run.optimizer, LOCO, memory=memory, weights=WeightCode())

    session = attach()
    plan = plan_of(session.sync)
    where = Setup(
        specs=[spec.whole for spec in plan.specs.values()],
        topology=plan.topology,
        wrapper="fsdp",
        modules=plan.modules or {},
    )
    ways = list(memory_options(LOCO, WeightCode(), where, may_recode=False))
    session.close()
    session = attach(between(ways[0].memory.total))
    facts: Facts = {"copies": session.sync.transactions.keeps_copies}
    session.close()
    facts["error"] = raised(lambda: attach(between(min(way.memory.total for way in ways))))
    run = wrapped("ddp", hidden=65)
    session = compress(run.model, run.optimizer, Auto())
    choice: Any = session.pace
    assigned = assign_all(choice._all[0].compressor, list(session.sync.specs.values()))
    choice._room = between(memory_of(plan_of(session.sync, assigned)).total) * 1e9
    run.train(session, 16)
    facts["tried"] = [each.name for each, _ in choice._tried]
    session.close()
    return facts


@scenarios(uneven, world_size=4)
def test_ranks_with_uneven_parts_choose_alike(facts: list[Facts]) -> None:
    for rank in facts:
        assert rank["copies"] == facts[0]["copies"]
        assert "compression would keep" in rank["error"]
        assert rank["tried"] == facts[0]["tried"]
