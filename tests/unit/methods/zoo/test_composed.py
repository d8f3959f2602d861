"""Partition and warm-up."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.qsgd import QSGD
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.zoo.composed import Partition, WarmUp
from testing.worlds.one_tensor import OneTensor, gaussian

MATRIX = TensorSpec("layer.weight", (64, 64))
VECTOR = TensorSpec("layer.bias", (64,))
EMBEDDING = TensorSpec("embedding.weight", (64, 64), "embedding")


def test_partition_takes_the_first_rule_that_matches() -> None:
    partition = Partition(
        rules=(("layer.*", QSGD(bits=2)), ("@embedding", LoCo(bits=3, high_precision=()))), default=LoCo(bits=4)
    )
    assert partition.method(MATRIX) == QSGD(bits=2).method(MATRIX)
    assert partition.assign(VECTOR).kind == "exempt"  # as its compressor says
    assert partition.method(EMBEDDING) == LoCo(bits=3).method(EMBEDDING)
    other = TensorSpec("head.weight", (64, 64))
    assert partition.method(other) == LoCo(bits=4).method(other)
    assert "name matches layer.*" in partition.assign(MATRIX).reason


def test_partition_follows_the_phases_of_its_compressors() -> None:
    partition = Partition(rules=(("layer.*", WarmUp(compressor=QSGD(), steps=10)),))
    assert partition.phase(0).method(MATRIX) == Dense().method(MATRIX)
    assert partition.phase(10).method(MATRIX) == QSGD().method(MATRIX)
    assert partition.phase(0) == partition.phase(5)


def test_warm_up_is_followed_by_the_compressor_and_its_phases() -> None:
    warm_up = WarmUp(compressor=WarmUp(compressor=QSGD(), steps=5, first=LoCo()), steps=10)
    assert [type(warm_up.phase(step)) for step in (0, 9, 10, 14, 15, 1000)] == [Dense, Dense, LoCo, LoCo, QSGD, QSGD]


def test_residuals_of_the_warm_up_go_on() -> None:
    ranks = OneTensor(WarmUp(compressor=LoCo(bits=2, residual="float32"), steps=2, first=LoCo(bits=8)), (32, 64), 2)
    g = [gaussian((32, 64), rank) for rank in range(2)]
    for _ in range(2):
        ranks.step(g)
    before = ranks.syncs[0].state.residual("p")
    ranks.syncs[0].follow_phase()
    after = ranks.syncs[0].state.residual("p")
    assert before is not None
    assert after is not None
    assert torch.allclose(after[1024:], before[1024:], atol=1e-6)  # the first half also takes the owner's residual


def test_what_is_made_of_a_sparse_one_is_sparse() -> None:
    assert WarmUp(compressor=TopK(), steps=4).is_sparse
    assert WarmUp(first=TopK(), steps=4).is_sparse
    assert Partition(rules=(("a.*", TopK()),)).is_sparse


def _optimizers() -> list[torch.optim.Optimizer]:
    parameters = [torch.nn.Parameter(torch.zeros(3))]
    return [torch.optim.SGD(parameters, lr=0.1, momentum=momentum) for momentum in (0.0, 0.9)] + [
        torch.optim.AdamW(parameters)
    ]


def test_momentum_inside_is_checked_against_the_optimizers() -> None:
    dgc = DGC(momentum=0.9)
    without, with_momentum, adam = _optimizers()
    with pytest.raises(ValueError, match=r"momentum is applied twice: 0.9 by the compressor and 0.9 by SGD"):
        Partition(rules=(("*", dgc),), default=dgc).check_optimizer(with_momentum)
    for optimizer in (without, with_momentum, adam):
        WarmUp(compressor=DGC()).check_optimizer(optimizer)
        for mixed in (WarmUp(compressor=dgc), Partition(rules=(("a*", dgc),), default=LoCo())):
            with pytest.raises(ValueError, match=r"momentum 0 and 0.9 to different parameters or phases"):
                mixed.check_optimizer(optimizer)
