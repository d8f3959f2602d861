"""Residuals of all types and none: what they cost, what they keep, and how a bucket is worked off in parts."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from lowbit_strategy.codecs import packed
from lowbit_strategy.codecs.packed import parts_of
from lowbit_strategy.collectives.layout import TensorSpec
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods._base.compressor import Compressor
from lowbit_strategy.methods.loco import LoCo
from lowbit_strategy.methods.zoo.errorfeedback import ErrorFeedback
from lowbit_strategy.methods.zoo.natural import NaturalCompression
from testing.worlds.single import engine, gradients, reduce_step

SPECS = [TensorSpec("blocks.0.weight", (512, 384)), TensorSpec("blocks.1.weight", (512, 384))]


@pytest.mark.parametrize(("residual", "nbytes"), [("int8", 1 + 2 / 128), ("none", 0.0), ("float32", 4.0)])
def test_bytes_per_parameter(residual: Literal["int8", "none", "float32"], nbytes: float) -> None:
    sync = engine(LoCo(residual=residual), SPECS, sharded=True)
    assert sync.state.nbytes == nbytes * sum(spec.numel for spec in SPECS)


@pytest.mark.parametrize("residual", ["int8", "none"])
def test_what_is_sent_adds_up_to_what_came_in(residual: Literal["int8", "none"]) -> None:
    """The mean over steps: fed back, or without bias."""
    sync = engine(LoCo(residual=residual, residual_rounding="stochastic", reset_steps=None), SPECS, sharded=True)
    grads = gradients(0, SPECS)
    total = {name: torch.zeros_like(values) for name, values in grads.items()}
    for _ in range(64):
        for name, out in reduce_step(sync, grads).items():
            total[name] += out
    for name, values in grads.items():
        error = (total[name] / 64 - values).norm() / values.norm()
        assert error < 0.03, (name, error)


@pytest.mark.parametrize(
    "compressor", [ErrorFeedback(residual="int8"), LoCo(residual="none"), NaturalCompression(bits=4)]
)
def test_the_same_bits_in_parts_of_any_size(compressor: Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for numel in (1 << 10, 1 << 30):
        monkeypatch.setattr(packed, "PART_NUMEL", {False: numel, True: numel})
        sync = engine(compressor, SPECS, sharded=True)
        results.append([reduce_step(sync, gradients(step, SPECS)) for step in range(3)])
    for small, large in zip(*results, strict=True):
        assert all(torch.equal(small[name], large[name]) for name in small)


def test_parts_have_every_piece_once_and_are_as_small_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PART_NUMEL", {False: 100, True: 10})
    rows = [Segment(0, numel, 0, 0, salt) for salt, numel in enumerate((60, 40, 1, 300, 0, 99, 1, 1))]
    parts = parts_of(Segments(rows), torch.device("cpu"))
    assert [[row.numel for row in part.rows] for part in parts] == [[60, 40], [1], [300], [0, 99, 1], [1]]
    assert parts_of(Segments([]), torch.device("cpu")) == ()


def test_only_an_even_grid_can_do_without_residual() -> None:
    with pytest.raises(ValueError, match="codebook must be 'uniform' with residual='none'"):
        LoCo(residual="none", bits=2, codebook="fitted")
