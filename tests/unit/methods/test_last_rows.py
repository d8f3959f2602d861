"""Methods that are seldom the best choice: each does what its publication defines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit_strategy import ACPSGD, ATOMO, DEFT, Compressor, GradiVeQ, GSpar, PowerSGD, SketchedSGD, ThreeLC
from lowbit_strategy.methods._base.chances import chances
from lowbit_strategy.methods.quantization.threelc import code_runs, decode_runs
from lowbit_strategy.methods.sparsification.deft import deal, pieces_of
from lowbit_strategy.methods.sparsification.sketchedsgd import CountSketch
from testing.worlds.one_tensor import OneTensor

CPU = torch.device("cpu")
SHAPE = (64, 128)


def one(compressor: Compressor, world_size: int = 1, shape: tuple[int, int] = SHAPE) -> OneTensor:
    return OneTensor(compressor, shape, world_size)


def step(matrix: OneTensor, *gradients: Tensor) -> Tensor:
    return matrix.step(gradients).view(gradients[0].shape)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mean_of_draws(compressor: Compressor, gradient: Tensor, draws: int) -> tuple[float, float]:
    """How far one result and the mean of many are from the gradient, relative to it."""
    matrix = one(compressor, shape=(gradient.shape[0], gradient.shape[1]))
    results = [step(matrix, gradient) for _ in range(draws)]
    first, mean = (results[0] - gradient).norm(), (torch.stack(results).mean(0) - gradient).norm()
    return float(first / gradient.norm()), float(mean / gradient.norm())


@pytest.mark.parametrize("count", [1, 7, 100, 999, 1000])
def test_chances_add_up_and_grow_with_the_size(count: int) -> None:
    sizes = normal(1000).abs().pow(3)
    p = chances(sizes, count)
    assert float(p.sum()) == pytest.approx(count, rel=2e-3)
    assert float(p.max()) <= 1.0
    uncertain = p < 1.0
    if uncertain.any():  # where nothing is certain, chance is proportional to size
        ratio = p[uncertain] / sizes[uncertain]
        assert float(ratio.max() / ratio.min()) == pytest.approx(1.0, rel=1e-3)
    assert not chances(torch.zeros(5), 2).any()


@pytest.mark.parametrize("compressor", [GSpar(density=0.2), ATOMO(rank=4)])
def test_what_is_drawn_is_right_on_average(compressor: Compressor) -> None:
    once, mean = mean_of_draws(compressor, normal(32, 48), 400)
    assert once > 0.5
    assert mean < 2.0 * once / math.sqrt(400)


def test_gspar_sends_as_many_as_it_was_given_on_average() -> None:
    matrix, gradient = one(GSpar(density=0.05)), normal(*SHAPE)
    counts = [int(step(matrix, gradient).count_nonzero()) for _ in range(20)]
    assert sum(counts) / 20 == pytest.approx(0.05 * gradient.numel(), rel=0.05)


def test_every_rank_sends_the_same_number_of_atoms() -> None:
    gradient = normal(32, 48)
    matrix = one(ATOMO(rank=3), shape=(32, 48))
    ranks = [int(torch.linalg.matrix_rank(step(matrix, gradient))) for _ in range(20)]
    assert set(ranks) == {3}


def test_a_gradient_of_low_rank_arrives_whole_after_both_factors() -> None:
    gradient = normal(64, 3) @ normal(3, 128, seed=1)
    matrix = one(ACPSGD(rank=3), world_size=2)
    results = [step(matrix, gradient, gradient) for _ in range(4)]
    unsent = matrix.syncs[0].state.export_unsent("p")
    assert float(unsent.norm() / gradient.norm()) < 1e-4
    torch.testing.assert_close(sum(results), 4 * gradient, rtol=0, atol=1e-2)


def test_half_of_the_bytes_of_powersgd() -> None:
    sent = {}
    for compressor in (ACPSGD(rank=4), PowerSGD(rank=4)):
        matrix = one(compressor, world_size=2)
        for seed in range(2):
            step(matrix, normal(*SHAPE, seed=seed), normal(*SHAPE, seed=9))
        sent[compressor.name] = matrix.world.comms[0].sent_nbytes
    assert 2 * sent["acpsgd"] == sent["powersgd"]


def test_slices_in_a_common_subspace_arrive_whole() -> None:
    """8 of 64 dims: what the leader finds in its slices holds for the other rank's."""
    subspace = torch.linalg.qr(normal(64, 8)).Q
    gradients = [(normal(128, 8, seed=rank) @ subspace.T).view(*SHAPE) for rank in range(2)]
    matrix = one(GradiVeQ(slice_size=64, ratio=8), world_size=2)
    torch.testing.assert_close(step(matrix, *gradients), sum(gradients) / 2, rtol=0, atol=1e-4)
    turned = [gradient.roll(1, 1) for gradient in gradients]
    assert float((step(matrix, *turned) - sum(turned) / 2).norm() / turned[0].norm()) > 0.1
    assert matrix.world.comms[1].sent_nbytes * 8 < matrix.world.comms[0].sent_nbytes * 8 < 2 * 4 * 8192 * 2


def test_a_sketch_is_linear_and_finds_what_is_large() -> None:
    x, y = 0.01 * normal(5000), 0.01 * normal(5000, seed=1)
    large = torch.tensor([3, 77, 1234, 4999])
    x[large] += torch.tensor([1.0, -2.0, 1.5, -1.0])
    sketch = CountSketch(5000, 5, 256, seed=5, device=CPU)
    torch.testing.assert_close(sketch.of(x) + sketch.of(y), sketch.of(x + y), rtol=0, atol=1e-5)
    estimate = sketch.estimate(sketch.of(x + y))
    assert estimate.abs().topk(4).indices.sort().values.tolist() == large.tolist()
    torch.testing.assert_close(estimate[large], (x + y)[large], rtol=0, atol=0.5)


def test_what_is_large_in_the_sum_only_is_found() -> None:
    """Each rank has larger elements, which the other one cancels."""
    own, common = torch.zeros(4096), torch.zeros(4096)
    own[:40], common[1000:1020] = 5.0, 1.0
    matrix = one(SketchedSGD(density=20 / 4096, columns_per_entry=32), world_size=2, shape=(32, 128))
    mean = step(matrix, (common + own).view(32, 128), (common - own).view(32, 128))
    assert torch.equal(mean.view(-1), common)


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
    matrix = one(ThreeLC(exempt=()), world_size=2)
    assert torch.equal(step(matrix, gradient, gradient)[0, :4], torch.tensor([1.0, 0.0, -1.0, 0.0]))
    unsent = matrix.syncs[0].state.export_unsent("p")[:4]
    torch.testing.assert_close(unsent, torch.tensor([0.0, 0.4, 0.4, 0.0]))
    with pytest.raises(ValueError, match="sparsity must be in"):
        ThreeLC(sparsity=2.0)


def test_three_values_of_a_gaussian_take_a_third_of_a_bit() -> None:
    matrix = one(ThreeLC(), world_size=2, shape=(512, 512))
    step(matrix, normal(512, 512), normal(512, 512, seed=1))
    assert 8 * matrix.world.comms[0].sent_nbytes / 512**2 < 0.5


def test_parts_are_dealt_out_whole_and_evenly() -> None:
    sizes = [10, 5000, 300, 7, 20000, 1]
    parts = pieces_of(sizes, 4)
    for view, size in enumerate(sizes):
        edges = [(start, stop) for which, start, stop in parts if which == view]
        assert edges[0][0] == 0
        assert edges[-1][1] == size
        assert [a[1] for a in edges[:-1]] == [b[0] for b in edges[1:]]
    norms = [float(index + 1) for index in range(len(parts))]
    dealt = deal(sizes, norms, 0.01, 4, turn=3)
    assert sum(piece.kept for piece in dealt) == pytest.approx(0.01 * sum(sizes), rel=0.05)
    loads = [sum((p.stop - p.start) * math.log2(p.kept + 1) for p in dealt if p.rank == rank) for rank in range(4)]
    assert max(loads) < 1.3 * sum(loads) / 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradiVeQ(slice_size=60), "slice_size must be a multiple of ratio"),
        (lambda: SketchedSGD(rows=0), "rows must be a positive integer"),
        (lambda: DEFT(density=0.0), "density must be in"),
        (lambda: ACPSGD(rank=0), "rank must be a positive integer"),
        (lambda: ATOMO(min_compression_rate=0.0), "min_compression_rate must be positive"),
    ],
)
def test_options_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
