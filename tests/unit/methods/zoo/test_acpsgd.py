"""ACP-SGD: one factor in each step."""

from __future__ import annotations

import torch

from lowbit_strategy import ACPSGD, PowerSGD
from testing.worlds.one_tensor import OneTensor, gaussian

SHAPE = (64, 128)


def test_a_gradient_of_low_rank_arrives_whole_after_both_factors() -> None:
    gradient = gaussian((64, 3), 0) @ gaussian((3, 128), 1)
    matrix = OneTensor(ACPSGD(rank=3), SHAPE, 2)
    results = [matrix.step([gradient, gradient]).view(SHAPE) for _ in range(4)]
    unsent = matrix.syncs[0].state.export_unsent("p")
    assert float(unsent.norm() / gradient.norm()) < 1e-4
    torch.testing.assert_close(sum(results), 4 * gradient, rtol=0, atol=1e-2)


def test_half_of_the_bytes_of_powersgd() -> None:
    sent = {}
    for compressor in (ACPSGD(rank=4), PowerSGD(rank=4)):
        matrix = OneTensor(compressor, SHAPE, 2)
        for seed in range(2):
            matrix.step([gaussian(SHAPE, seed), gaussian(SHAPE, 9)])
        sent[compressor.name] = matrix.world.comms[0].sent_nbytes
    assert 2 * sent["acpsgd"] == sent["powersgd"]
