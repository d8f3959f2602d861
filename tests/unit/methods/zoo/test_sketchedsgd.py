"""Sketched SGD: sketches add up, and what is large in the sum is found."""

from __future__ import annotations

import torch

from lowbit_strategy import SketchedSGD
from lowbit_strategy.methods.zoo.sketchedsgd import CountSketch
from testing.worlds.one_tensor import OneTensor, gaussian


def test_a_sketch_is_linear_and_finds_what_is_large() -> None:
    x, y = 0.01 * gaussian((5000,), 0), 0.01 * gaussian((5000,), 1)
    large = torch.tensor([3, 77, 1234, 4999])
    x[large] += torch.tensor([1.0, -2.0, 1.5, -1.0])
    sketch = CountSketch(5000, 5, 256, seed=5, device=torch.device("cpu"))
    torch.testing.assert_close(sketch.of(x) + sketch.of(y), sketch.of(x + y), rtol=0, atol=1e-5)
    estimate = sketch.estimate(sketch.of(x + y))
    assert estimate.abs().topk(4).indices.sort().values.tolist() == large.tolist()
    torch.testing.assert_close(estimate[large], (x + y)[large], rtol=0, atol=0.5)


def test_what_is_large_in_the_sum_only_is_found() -> None:
    """Each rank has larger elements, which the other one cancels."""
    own, common = torch.zeros(4096), torch.zeros(4096)
    own[:40], common[1000:1020] = 5.0, 1.0
    matrix = OneTensor(SketchedSGD(density=20 / 4096, columns_per_entry=32), (32, 128), 2)
    mean = matrix.step([(common + own).view(32, 128), (common - own).view(32, 128)])
    assert torch.equal(mean.view(-1), common)
