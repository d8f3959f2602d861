"""3LC: three values, and runs of zeros."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy import ThreeLC
from lowbit_strategy.methods.zoo.threelc import code_runs, decode_runs
from testing.worlds.one_tensor import OneTensor, gaussian


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_runs_of_zeros_come_back_as_they_were(share: float) -> None:
    torch.manual_seed(0)
    for size in (0, 1, 13, 14, 15, 28, 29, 1000):
        plain = torch.where(torch.rand(size) < share, torch.randint(0, 243, (size,)), 121).to(torch.uint8)
        coded = code_runs(plain)
        assert torch.equal(decode_runs(coded), plain)
        if share == 0.0:
            assert coded.numel() == -(-size // 14)
    expected = {1: [121], 2: [243], 14: [255], 15: [255, 121], 16: [255, 243]}  # table 1 of the publication
    assert {size: code_runs(torch.full((size,), 121, dtype=torch.uint8)).tolist() for size in expected} == expected


def test_three_values_and_what_they_lack() -> None:
    gradient = torch.tensor([[1.0, 0.4, -0.6, 0.0]]).repeat(64, 32)
    matrix = OneTensor(ThreeLC(exempt=()), (64, 128), 2)
    assert torch.equal(matrix.step([gradient, gradient])[:4], torch.tensor([1.0, 0.0, -1.0, 0.0]))
    unsent = matrix.syncs[0].state.export_unsent("p")[:4]
    torch.testing.assert_close(unsent, torch.tensor([0.0, 0.4, 0.4, 0.0]))


def test_three_values_of_a_gaussian_take_a_third_of_a_bit() -> None:
    matrix = OneTensor(ThreeLC(), (512, 512), 2)
    matrix.step([gaussian((512, 512), 0), gaussian((512, 512), 1)])
    assert 8 * matrix.world.comms[0].sent_nbytes / 512**2 < 0.5
