"""The ends of what sparse methods may be asked for: everything, one element for all, nothing at all."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods._base.base import Compressor
from lowbit_strategy.methods.sparsification.dgc import DGC
from lowbit_strategy.methods.sparsification.exdyna import ExDyna
from lowbit_strategy.methods.sparsification.gtopk import GTopK
from lowbit_strategy.methods.sparsification.micro import MiCRO
from lowbit_strategy.methods.sparsification.randomk import RandomK
from lowbit_strategy.methods.sparsification.scalecom import ScaleCom
from lowbit_strategy.methods.sparsification.sidco import SIDCo
from lowbit_strategy.methods.sparsification.topk import TopK
from tests.unit.methods.world import OneTensor, gaussian

KINDS = (TopK, DGC, SIDCo, ExDyna, MiCRO, GTopK, RandomK, ScaleCom)
SHAPE, NUMEL = (7, 33), 231


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("density", [0.0, -0.5, 1.0001, float("nan"), "0.1", True])
def test_a_density_outside_its_range_is_refused(kind: type[Compressor], density: object) -> None:
    with pytest.raises(ValueError, match=r"density must be (in \(0, 1\]|a number)"):
        kind(density=density)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_all_of_it_is_the_mean(kind: type[Compressor], world_size: int) -> None:
    ranks = OneTensor(kind(density=1.0), SHAPE, world_size)  # type: ignore[call-arg]
    for step in range(3):
        gradients = [gaussian((NUMEL,), 10 * step + rank) for rank in range(world_size)]
        mean = torch.stack(gradients).mean(0)
        torch.testing.assert_close(ranks.step(gradients), mean, atol=0.02, rtol=0)  # DGC keeps back the least


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_has_everything(kind: type[Compressor]) -> None:
    """Thresholds lie far above all other elements, and most ranks' shares of the positions have none above them."""
    ranks = OneTensor(kind(density=0.01), SHAPE, 5)  # type: ignore[call-arg]
    gradients = [1e-3 * gaussian((NUMEL,), rank) for rank in range(5)]
    for gradient in gradients:
        gradient[100] = 1e3
    total = torch.zeros(NUMEL)
    for _ in range(40):
        mean = ranks.step(gradients)
        assert mean.isfinite().all()
        total += mean
    assert total[100] >= 1e3  # sent in some steps, however rarely its position is drawn
    assert total.abs().argmax() == 100


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_choose_nothing(kind: type[Compressor]) -> None:
    ranks = OneTensor(kind(density=0.1), SHAPE, 3)  # type: ignore[call-arg]
    for _ in range(2):
        assert not ranks.step([torch.zeros(NUMEL) for _ in range(3)]).any()
    assert ranks.step([gaussian((NUMEL,), rank) for rank in range(3)]).any()
