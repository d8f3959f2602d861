"""The sample that the end-to-end error is estimated from: right for columns of any size, on any rank's part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit_strategy.collectives.comm import Comm, LocalComm
from lowbit_strategy.collectives.layout import ParamView, TensorSpec, dim0_row_numel
from lowbit_strategy.engine.engine import GradientSync
from lowbit_strategy.methods.dense import Dense
from lowbit_strategy.ranks.ranks import Ranks
from lowbit_strategy.telemetry.measure import StepMeasure, sampled
from testing.worlds.threaded import ThreadedWorld

CPU = torch.device("cpu")


def measure_of(spec: TensorSpec, comm: Comm, seed: int) -> StepMeasure:
    return StepMeasure(GradientSync(Dense(), [spec], Ranks.flat(comm), CPU, sharded=spec.sharded, seed=seed))


def estimates(gradient: Tensor, result: Tensor, seeds: range) -> Tensor:
    spec = TensorSpec("weight", tuple(gradient.shape))
    found = []
    for seed in seeds:
        out = gradient.flatten().clone()
        measure = measure_of(spec, LocalComm(), seed)
        for pending in measure.compare([ParamView(spec, 1, spec.numel, x=out, out=out)], LocalComm(), iter([None])):
            if pending is None:
                out.copy_(result.flatten())
        error, mean = measure.rows["end_to_end"]["weight"].tolist()
        found.append((error / mean) ** 0.5)
    return torch.tensor(found)


def test_columns_of_very_different_size_raise_no_false_alarm() -> None:
    """Every row's length is the stride at which 2,048 elements would be picked: a stride sees a single column."""
    generator = torch.Generator().manual_seed(0)
    columns = torch.randn(2048, generator=generator).exp()
    gradient = torch.randn(2048, 2048, generator=generator) * columns
    result = gradient + 0.2 * torch.randn(2048, 2048, generator=generator)  # small columns drown in it
    true = float((result - gradient).norm() / gradient.norm())
    low, middle, high = estimates(gradient, result, range(60)).quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    assert true * 0.75 < low < high < true * 1.4
    assert middle == pytest.approx(true, rel=0.1)


def test_gradients_below_the_smallest_squares_of_float32_have_an_error() -> None:
    gradient = 1e-25 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert estimates(gradient, 1.5 * gradient, range(1)).item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("numel", [0, 1, 5, 2047, 2048, 2049, 3000, 4096, 100_003])
def test_every_element_is_picked_as_often_as_its_weight_says(numel: int) -> None:
    totals = []
    for seed in range(200):
        positions, weights = sampled(numel, seed, CPU)
        assert len(positions) == min(numel, 2048)
        assert int(weights.sum()) == numel
        assert bool((positions.diff() > 0).all())
        assert not len(positions) or 0 <= int(positions[0]) <= int(positions[-1]) < numel
        totals.append(float((positions.double() ** 2 * weights).sum()))
    expected = float((torch.arange(numel).double() ** 2).sum())
    assert sum(totals) / 200 == pytest.approx(expected, rel=1e-4)


def test_a_sample_of_a_tensor_beyond_two_to_the_31() -> None:
    positions, weights = sampled(2**33 + 5, 3, CPU)
    assert int(positions[-1]) > 2**32
    assert len(set((positions % 2).tolist())) == 2  # the low bits are hashed as well
    assert int(weights.sum()) == 2**33 + 5


@pytest.mark.parametrize("shape", [(5, 700), (64, 64), (3, 1)])
def test_rows_of_a_reduce_scatter_add_up_to_the_whole(shape: tuple[int, ...]) -> None:
    """Three ranks, the last with a shorter row or none: their sums together are those of an all-reduce."""
    world = ThreadedWorld(3)
    spec, row_numel = TensorSpec("weight", shape), dim0_row_numel(shape, 3)
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(spec.numel, generator=generator) for _ in range(3)]
    total = sum(gradients)
    noise = 0.1 * torch.randn(spec.numel, generator=generator)

    def one(rank: int, sharded: bool) -> Tensor:
        x = gradients[rank].clone()
        if sharded:
            padded = torch.nn.functional.pad(x, (0, 3 * row_numel - spec.numel)).view(3, -1)
            out = torch.zeros(row_numel)
            view = ParamView(replace(spec, sharded=True), 3, row_numel, x=padded, out=out)
        else:
            out = x
            view = ParamView(spec, 3, row_numel, x=x, out=out)
        measure = measure_of(view.spec, world.comms[rank], 7)
        for pending in measure.compare([view], world.comms[rank], iter([None])):
            if pending is not None:
                pending.wait()
            else:
                view.write_mean_(total / 3 + noise, rank)
        return measure.rows["end_to_end"]["weight"]

    try:
        sums = {}
        for sharded in (False, True):
            futures = [world._threads.submit(one, rank, sharded) for rank in range(3)]
            sums[sharded] = sum(future.result() for future in futures)
    finally:
        world.close()
    assert torch.allclose(sums[True], sums[False], rtol=1e-5)
    assert sums[False][0] / sums[False][1] == pytest.approx(
        float(noise.square().sum() / (total / 3).square().sum()), rel=0.1
    )
