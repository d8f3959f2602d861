"""Top-k by chunks."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.methods.zoo.chunktopk import ChunkTopK
from testing.worlds.one_tensor import OneTensor, gaussian


@pytest.mark.parametrize(
    ("world_size", "values", "residual"),
    [(1, "float32", "int8"), (1, "int4", "float32"), (3, "float32", "float32"), (3, "int4", "int8")],
)
def test_chunks_lose_nothing_on_either_hop(world_size: int, values: str, residual: str) -> None:
    shape, numel = (130, 100), 13_000
    topk = ChunkTopK(density=0.01, values=values, residual=residual)
    ranks = OneTensor(topk, shape, world_size)
    came, went = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    steps = 60 if residual == "int8" else 10
    gradients = [gaussian((numel,), rank) for rank in range(world_size)]
    for _ in range(steps):
        came += torch.stack(gradients).double().mean(0)
        mean = ranks.step(gradients)
        assert 0 < int(mean.count_nonzero()) <= 140
        went += mean.double()
    left = sum(sync.state.export_unsent("p").double() for sync in ranks.syncs) / world_size  # the owners' residuals too
    lost = came - went - left
    assert float(lost.norm() / came.norm()) < (1e-5 if residual == "float32" else 0.05)


def test_options_are_checked() -> None:
    for options, message in (
        ({"decay": 0.0}, "decay must be in"),
        ({"gather": True, "residual": "int8"}, "gather=True keeps its residual in float32"),
        ({"cosines": 48}, "power of two"),
    ):
        with pytest.raises(ValueError, match=message):
            ChunkTopK(**options)
