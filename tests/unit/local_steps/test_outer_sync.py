"""Local steps in the engine, ranks in threads: conservation, order of turns, fragments, bytes, bad speeds."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from lowbit_strategy import (
    OUTER_RULES,
    Dense,
    DiLoCo,
    EagerDiLoCo,
    LocalSGD,
    LoCo,
    OverlapLocalSGD,
)
from lowbit_strategy.codecs.sparse_values import value_codec
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.local_steps.fragment import Fragment
from lowbit_strategy.local_steps.outer_sync import OuterSync
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.zoo.chunk_codec import ChunkCodec
from lowbit_strategy.methods.zoo.chunktopk import ChunkTopK
from lowbit_strategy.model.parameters import describe_parameters
from lowbit_strategy.ranks.ranks import Ranks
from testing.worlds.replicas import Replicas
from testing.worlds.threaded import ThreadedWorld

CPU = torch.device("cpu")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_local_sgd_takes_the_mean_of_weights_and_buffers(world_size: int) -> None:
    ranks = Replicas(LocalSGD(every=3), world_size=world_size)
    for seed in range(2):
        ranks.step(seed)
    for rank in range(world_size):
        ranks.local_step(rank, 2)
    mean = torch.stack([ranks.weights(rank) for rank in range(world_size)]).mean(0)
    ranks.together(lambda rank: ranks.outers[rank].after_step())
    for rank in range(world_size):
        torch.testing.assert_close(ranks.weights(rank), mean, rtol=0, atol=1e-6)
    ranks.world.close()


@pytest.mark.parametrize("name", OUTER_RULES)
def test_how_many_buckets_a_fragment_has_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for bucket_numel in (2**21, 40):
        monkeypatch.setattr("lowbit_strategy.local_steps.cutting.BUCKET_NUMEL", bucket_numel)
        ranks = Replicas(OUTER_RULES[name], OUTER_RULES[name].compressor())
        fragment = ranks.outers[0].fragments[0]
        parts = [part for _, _, part in fragment.buckets]
        assert (len(parts) > 1) == (bucket_numel == 40 and len(fragment.params) > 1)
        assert [index for part in parts for index in range(part.start, part.stop)] == list(range(fragment.numel))
        assert [layout.last for _, layout, _ in fragment.buckets] == [False] * (len(parts) - 1) + [True]
        for seed in range(32):
            ranks.step(seed)
        ranks.finish()
        found.append(ranks.weights(0))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", OUTER_RULES)
def test_every_rule_ends_with_the_same_weights(name: str) -> None:
    ranks = Replicas(OUTER_RULES[name], OUTER_RULES[name].compressor())
    for seed in range(62):
        ranks.step(seed)
    first = ranks.outers[0]
    anchors = [torch.cat([a.reshape(-1) for a in outer.anchors.values()]) for outer in ranks.outers]
    assert torch.equal(*anchors)
    assert first.drift is not None
    assert first.drift > 0
    ranks.finish()
    assert torch.equal(ranks.weights(0), ranks.weights(1))


def test_overlap_local_sgd_pulls_at_the_end_of_every_round() -> None:
    """The published algorithm on the same local steps, the first round included."""
    rule, ranks = OverlapLocalSGD(every=2, mix=0.4, momentum=0.7), Replicas(OverlapLocalSGD(every=2))

    def weights(rank: int) -> torch.Tensor:
        return torch.cat([param.detach().reshape(-1) for param in ranks.models[rank].parameters()])

    anchor, velocity, traveling = weights(0), 0.0, None
    for seed in range(4):
        ranks.step(2 * seed)
        for rank in range(2):
            ranks.local_step(rank, 2 * seed + 1)
        if traveling is not None:
            velocity = rule.momentum * velocity + traveling - anchor
            anchor = anchor + velocity
        pulled = [torch.lerp(anchor, weights(rank), rule.mix) for rank in range(2)]
        traveling = (pulled[0] + pulled[1]) / 2
        ranks.together(lambda rank: ranks.outers[rank].after_step())
        for rank in range(2):
            torch.testing.assert_close(weights(rank), pulled[rank], rtol=0, atol=1e-6)
    ranks.world.close()


@pytest.mark.parametrize(
    "compressor", [Dense(), LoCo(bits=4, beta=0.0, block_size=32, residual="float32", reset_steps=None)]
)
def test_a_pseudo_gradient_is_reduced_with_its_residual(compressor: Compressor) -> None:
    """Without momentum the anchors' movement and what has not been sent add up to the mean of all movements."""
    ranks = Replicas(LocalSGD(every=2), compressor)
    before = {name: anchor.clone() for name, anchor in ranks.outers[0].anchors.items()}
    ranks.step(0)
    for rank in range(2):
        ranks.local_step(rank, 1)
    moves = [{name: before[name] - p.detach() for name, p in model.named_parameters()} for model in ranks.models]
    ranks.together(lambda rank: ranks.outers[rank].after_step())
    for name, anchor in ranks.outers[0].anchors.items():
        unsent = [outer.sync.state.export_unsent(name) for outer in ranks.outers]
        lacking = sum(0.0 if each is None else each.view_as(anchor) for each in unsent) / 2
        mean = (moves[0][name] + moves[1][name]) / 2
        torch.testing.assert_close(before[name] - anchor + lacking, mean, rtol=0, atol=1e-6)
    ranks.world.close()


@pytest.mark.parametrize("rounds", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_rounds_at_different_speeds(rounds: int) -> None:
    """One rank takes twice as long per step, another has half as many steps in all: nobody hangs or diverges."""
    ranks = Replicas(DiLoCo(every=2, fragments=2, momentum=0.5), LoCo(beta=0.0, reset_steps=None), world_size=3)

    def train(rank: int) -> None:
        pause = random.Random(rank)
        for seed in range(2 * rounds if rank else rounds):
            ranks.local_step(rank, seed)
            time.sleep(pause.uniform(0, 2e-4) * (1 + (rank == 1)))
            ranks.outers[rank].after_step()
        ranks.outers[rank].finish()

    ranks.together(train)
    ranks.world.close()
    assert torch.equal(ranks.weights(0), ranks.weights(1))
    assert torch.equal(ranks.weights(0), ranks.weights(2))
    assert ranks.weights(0).isfinite().all()
    assert ranks.outers[1].num_syncs >= 2 * rounds


def test_anchors_are_what_others_see() -> None:
    ranks = Replicas(DiLoCo(every=5))
    for seed in range(7):
        ranks.step(seed)
    own = ranks.weights(0)
    with ranks.outers[0].shared_weights(), ranks.outers[0].shared_weights(), ranks.outers[1].shared_weights():
        assert torch.equal(ranks.weights(0), ranks.weights(1))
        assert not torch.equal(ranks.weights(0), own)
        saved = ranks.outers[0].state_dict()["weights"]
        assert not torch.equal(saved["0.weight"], ranks.models[0][0].weight)  # type: ignore[index]
    assert torch.equal(ranks.weights(0), own)
    ranks.finish()
    with torch.no_grad():
        ranks.models[0][0].weight.zero_()  # type: ignore[index]
    with ranks.outers[0].shared_weights():  # training has ended: the model is the user's
        assert not ranks.models[0][0].weight.any()  # type: ignore[index]


def test_weights_of_a_smaller_type_do_not_drag_the_anchor() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to(torch.bfloat16)
    world = ThreadedWorld(1)
    sync = GradientSync(Dense(), describe_parameters(model), Ranks.flat(world.comms[0]), CPU, sharded=False)
    outer = OuterSync(sync, dict(model.named_parameters()), LocalSGD(every=1))
    for anchor in outer.anchors.values():
        anchor.mul_(1 + 1e-4)  # less than bfloat16 can hold
    before = {name: anchor.clone() for name, anchor in outer.anchors.items()}
    outer.after_step()
    for name, anchor in outer.anchors.items():
        assert torch.equal(anchor, before[name])
    world.close()


def test_eager_updates_are_those_published() -> None:
    """Each rank's weights after a turn are its own outer optimizer's, with its new share and the others' last one."""
    ranks = Replicas(EagerDiLoCo(every=3, lr=0.7, momentum=0.9))
    starts = [{name: param.detach().clone() for name, param in outer.model.params.items()} for outer in ranks.outers]
    optimizers = [torch.optim.SGD(list(start.values()), lr=0.7, momentum=0.9, nesterov=True) for start in starts]
    last = [{name: torch.zeros_like(value) for name, value in start.items()} for start in starts]
    for turn in range(5):
        for seed in range(2):
            ranks.step(10 * turn + seed)
        for rank in range(2):
            ranks.local_step(rank, 10 * turn + 2)
        own = [
            {name: start[name] - param.detach() for name, param in outer.model.params.items()}
            for start, outer in zip(starts, ranks.outers, strict=True)
        ]
        ranks.together(lambda rank: ranks.outers[rank].after_step())
        for rank, (start, optimizer) in enumerate(zip(starts, optimizers, strict=True)):
            for name, value in start.items():
                mean = (last[0][name] + last[1][name]) / 2
                value.grad = own[rank][name] / 2 + mean - last[rank][name] / 2
            optimizer.step()
            for name, param in ranks.outers[rank].model.params.items():
                torch.testing.assert_close(param, start[name], rtol=1e-4, atol=1e-5)
        last = own
    assert not torch.equal(ranks.weights(0), ranks.weights(1))
    ranks.finish()
    assert torch.equal(ranks.weights(0), ranks.weights(1))


def test_the_sample_of_the_drift_is_in_step_with_no_row() -> None:
    """256 elements of a matrix whose rows have 64: a stride would take a few of its columns."""
    specs = [TensorSpec("weight", (256, 64))]
    fragment = Fragment([specs], {"weight": torch.zeros(256, 64)})
    assert len(set((fragment.sample % 64).tolist())) > 48


def test_the_mean_of_sparse_messages_is_exact() -> None:
    """What one rank sends reaches all ranks whole: the first round's anchor moves by the mean of what was sent."""
    compressor = OUTER_RULES["sparseloco"].compressor()
    assert isinstance(compressor, ChunkTopK)
    ranks = Replicas(OUTER_RULES["sparseloco"], replace(compressor, exempt=()), world_size=4)
    for _ in range(29):
        for outer in ranks.outers:
            outer.after_step()
    for rank in range(4):
        ranks.local_step(rank, 2)
    before = {name: anchor.clone() for name, anchor in ranks.outers[0].anchors.items()}
    moved = [{name: before[name] - param for name, param in outer.model.params.items()} for outer in ranks.outers]
    ranks.together(lambda rank: ranks.outers[rank].after_step())
    for name, spec in ranks.outers[0].sync.specs.items():
        if spec.ndim > 1:
            codec = ChunkCodec(1 / 64, value_codec(compressor.values))
            wires = torch.stack([codec.encode(each[name].reshape(-1), seed=0) for each in moved])
            mean = codec.decode_sum(wires, spec.numel).view(spec.shape) / 4
            torch.testing.assert_close(ranks.outers[0].anchors[name], before[name] - mean, rtol=0, atol=1e-7)
    ranks.world.close()
