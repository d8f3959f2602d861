"""A change of level regroups parameters; the framework's buckets and compiled modules do not notice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from lowbit_strategy import LoCo, PowerSGD, TopK
from lowbit_strategy.collectives.comm import Pending
from lowbit_strategy.control import Phase, Schedule
from lowbit_strategy.engine.bucket import Bucket, BucketLayout
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.lightning import AdaptiveCompression
from testing.processes.scenarios import Facts, scenarios
from testing.training.regression import KINDS, Regression, loader, mlp, strategy, trainer

STEPS = 12  # DDP orders its buckets again once, after the first of them
PHASES = (LoCo(bits=8, block_size=32), LoCo(bits=2, block_size=64), PowerSGD(rank=1, start_step=0), TopK(density=0.05))
PHASE_STEPS = 3


class Seen(NamedTuple):
    """A bucket on its way to the engine; `where`: its address, 0 under FSDP2."""

    layout: BucketLayout
    numel: int
    where: int


class Buckets(L.Callback, StepListener):
    """What every step's buckets hold and where they lie, and how many graphs have been compiled until then.

    And whether the step had begun before its backward pass.
    """

    traces = False

    def __init__(self, adaptive: AdaptiveCompression) -> None:
        self.adaptive = adaptive
        self.steps: list[list[Seen]] = []
        self.graphs: list[int] = []
        self.begun: list[bool] = []

    def on_train_start(self, *_: Any) -> None:
        assert self.adaptive.driver is not None
        self.sync = self.adaptive.driver.sync
        self.sync.listeners.add(self, StepPhase.OBSERVE)

    def on_before_backward(self, *_: Any) -> None:
        self.begun.append(self.sync.has_begun)

    def begin_step(self) -> Buckets:
        self.steps.append([])
        return self

    def end_step(self, *, counted: bool) -> None:
        self.graphs.append(counters["stats"]["unique_graphs"])

    def observe(
        self, bucket: Bucket, x: Tensor, out: Tensor, stages: Iterator[Pending | None]
    ) -> Iterator[Pending | None]:
        where = x.data_ptr() if not self.sync.sharded else 0  # FSDP2 takes fresh memory for every bucket
        self.steps[-1].append(Seen(bucket.layout, x.numel(), where))
        yield from stages


def switching(folder: Path, kind: str) -> Facts:
    torch._dynamo.reset()
    counters.clear()
    net = mlp()
    net[2] = torch.compile(net[2], backend="eager")
    phases = [Phase(compressor=compressor, start=PHASE_STEPS * at) for at, compressor in enumerate(PHASES)]
    adaptive = AdaptiveCompression(Schedule(phases))
    buckets = Buckets(adaptive)
    model = Regression(net)
    with torch._dynamo.config.patch(optimize_ddp=False):  # it asserts on DDP buckets of a few kilobytes
        trainer(strategy(kind), max_steps=STEPS, callbacks=[adaptive, buckets]).fit(model, loader())
    assert adaptive.driver is not None
    return {
        "buckets": buckets.steps,
        "graphs": buckets.graphs,
        "begun": buckets.begun,
        "levels": set(adaptive.driver.levels.values()),
        "losses": model.losses,
    }


@scenarios(switching, kind=KINDS)
def test_a_switch_leaves_buckets_and_compiled_modules_alone(facts: list[Facts]) -> None:
    for fact in facts:
        assert fact["levels"] == {len(PHASES) - 1}
        assert len(fact["buckets"]) == STEPS
        settled = fact["buckets"][1]
        assert len(settled) > 1
        assert all(buckets == settled for buckets in fact["buckets"][1:])
        assert fact["graphs"][0] > 0
        assert fact["graphs"] == [fact["graphs"][0]] * STEPS
        assert fact["losses"][-1] < fact["losses"][0]


@scenarios(switching, kind=KINDS)
def test_parameters_are_regrouped_before_backward_and_not_inside_a_collective(facts: list[Facts]) -> None:
    """On CUDA a collective has its own stream, in which memory must not change hands."""
    for fact in facts:
        assert fact["begun"] == [True] * STEPS
