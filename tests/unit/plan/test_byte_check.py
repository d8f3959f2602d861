"""What is sent is compared with what was planned."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy import LoCo, PowerSGD, TopK, WeightCode, WeightDelta
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.bucket import Bucket, BucketLayout, BucketObserver
from lowbit_strategy.engine.bucket_schedule import Stages
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.engine.listeners import StepListener, StepPhase
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.weight_codings import WeightCoding
from lowbit_strategy.plan.byte_check import ByteCheck, WeightCheck, promised
from lowbit_strategy.plan.weight_bytes import module_weights
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.shards import Shards
from testing.worlds.simulated import SimulatedWorld

CPU = torch.device("cpu")
LAYOUT = BucketLayout((("p", 0),))


class Engines:
    """A parameter on two simulated ranks, whose bytes are checked on the first."""

    def __init__(self, compressor: Compressor) -> None:
        self.world, specs = SimulatedWorld(2), [TensorSpec("p", (48, 64))]
        self.syncs = [
            GradientSync(compressor, specs, Ranks.flat(comm), CPU, sharded=False) for comm in self.world.comms
        ]
        ByteCheck(self.syncs[0])

    def step(self) -> None:
        buffers = [torch.randn(48 * 64) for _ in self.syncs]
        self.world.reduce(self.syncs, LAYOUT, buffers, buffers)


class SendsMore(StepListener, BucketObserver):
    """Sends something after each bucket over the same comm, as a monitor does."""

    def begin_step(self) -> BucketObserver:
        return self

    def observe(self, bucket: Bucket, x: torch.Tensor, out: torch.Tensor, stages: Stages) -> Stages:
        yield from stages
        yield bucket.context.comm.all_reduce(torch.zeros(1000))


@pytest.mark.parametrize("compressor", [LoCo(exempt=()), PowerSGD(rank=2), TopK(density=0.1)], ids=repr)
def test_every_kind_of_method_keeps_what_it_promises(compressor: Compressor) -> None:
    engines = Engines(compressor)
    for _ in range(3):
        engines.step()
    bucket = next(iter(engines.syncs[0]._buckets.values()))
    assert promised(bucket).nbytes > 0


def test_a_method_that_sends_more_than_it_says_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines(PowerSGD(rank=2))
    (method,) = {each.method for each in engines.syncs[0].state.assignments.values()}
    monkeypatch.setattr(type(method), "wire_nbytes", lambda self, spec, num_peers: 100)
    with pytest.raises(RuntimeError, match=r"bytes of gradients were sent in this step, but 100 and at most 32 of"):
        engines.step()


def test_what_others_send_is_not_charged_to_methods() -> None:
    engines = Engines(LoCo(exempt=()))
    for sync in engines.syncs:
        sync.listeners.add(SendsMore(), StepPhase.OBSERVE)
    before = engines.world.comms[0].sent_nbytes
    engines.step()
    (bucket,) = engines.syncs[0]._buckets.values()
    assert engines.world.comms[0].sent_nbytes - before == promised(bucket).nbytes + 4000


def test_weights_that_were_not_promised_are_an_error() -> None:
    shards = Shards(WeightCode(), 2)
    checks = [WeightCheck(sync) for sync in shards.syncs]
    shards.gather()
    assert shards.syncs[1].comms[0].sent_nbytes > 0
    shards.syncs[1].comms[0].sent_nbytes += 1000
    checks[0].end_step()
    with pytest.raises(RuntimeError, match=r"rank 1 sent \d+ bytes for weights in this step, but \d+ and at most"):
        checks[1].end_step()


@pytest.mark.parametrize("coding", [WeightCode(), WeightCode(bits=4, keep="replica"), WeightDelta()], ids=repr)
def test_kept_weights_are_sent_once_and_cost_what_is_announced(coding: WeightCoding) -> None:
    shards = Shards(coding, 3)
    sync, check = shards.syncs[0], WeightCheck(shards.syncs[0])
    costs = module_weights(coding, sync.layouts["net"], 3)
    for seed in range(3):
        before = shards.sent()
        for _ in range(4):
            shards.gather()
        sent = shards.sent() - before
        shards.end_step()
        check.end_step()
        assert sync.step_nbytes == sent
        if seed or not coding.sends_differences:
            assert costs.step_nbytes <= sent <= costs.step_nbytes + costs.framing_nbytes
        shards.step_(seed)
    kept = sync.modules["net"].kept_nbytes
    assert costs.kept_nbytes <= kept <= costs.kept_nbytes + 3 * costs.framing_nbytes
