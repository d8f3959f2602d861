"""Residuals of 4 bits and of none: what they cost, what they keep, and how a bucket is worked off in parts."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from lowbit_strategy.codecs import packed
from lowbit_strategy.codecs.packed import parts_of
from lowbit_strategy.kernels.segments import Segment, Segments
from lowbit_strategy.methods._base.residual_format import pack_residual, unpack_residual
from lowbit_strategy.methods._base.tensor_spec import TensorSpec
from lowbit_strategy.methods.quantization.loco import LoCo
from lowbit_strategy.methods.quantization.qsgd import QSGD
from testing.worlds.single import engine, gradients, reduce_step

SPECS = [TensorSpec("blocks.0.weight", (512, 384)), TensorSpec("blocks.1.weight", (512, 384))]


@pytest.mark.parametrize(
    ("residual", "nbytes"), [("int8", 1 + 2 / 128), ("int4", 0.5 + 2 / 128), ("none", 0.0), ("float32", 4.0)]
)
def test_bytes_per_parameter(residual: Literal["int8", "int4", "none", "float32"], nbytes: float) -> None:
    sync = engine(LoCo(residual=residual), SPECS, scatter=True)
    assert sync.state.nbytes == nbytes * sum(spec.numel for spec in SPECS)


def test_a_residual_of_4_bits_is_read_as_written_to_half_a_step() -> None:
    e_KB = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 8, 50)[:, None]
    codes_KC, scale_K = pack_residual(e_KB)
    assert codes_KC.shape == (50, 64)
    assert codes_KC.dtype == torch.uint8
    error_KB = unpack_residual(codes_KC, scale_K) - e_KB
    assert (error_KB.abs() <= 0.5001 * scale_K[:, None]).all()
    zeros = torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3)
    assert not unpack_residual(*zeros).any()  # what a fresh arena holds


@pytest.mark.parametrize("residual", ["int8", "int4", "none"])
def test_what_is_sent_adds_up_to_what_came_in(residual: Literal["int8", "int4", "none"]) -> None:
    """The mean over steps: fed back, or without bias."""
    sync = engine(LoCo(residual=residual, residual_rounding="stochastic", reset_steps=None), SPECS, scatter=True)
    grads = gradients(0, SPECS)
    total = {name: torch.zeros_like(values) for name, values in grads.items()}
    for _ in range(64):
        for name, out in reduce_step(sync, grads).items():
            total[name] += out
    for name, values in grads.items():
        error = (total[name] / 64 - values).norm() / values.norm()
        assert error < 0.03, (name, error)


def test_a_reset_forgets_a_residual_of_4_bits() -> None:
    ours, fresh = (engine(LoCo(residual="int4", reset_steps=3), SPECS, scatter=True) for _ in range(2))
    for step in range(3):
        reduce_step(ours, gradients(step, SPECS))
    fresh.step_index = 3
    outs = [reduce_step(sync, gradients(3, SPECS)) for sync in (ours, fresh)]
    for spec in SPECS:
        assert torch.equal(outs[0][spec.name], outs[1][spec.name])
        assert all(
            torch.equal(ours.state.tensors(spec.name)[key], t) for key, t in fresh.state.tensors(spec.name).items()
        )


@pytest.mark.parametrize("compressor", [LoCo(residual="int4"), LoCo(residual="none"), QSGD(norm="l2", bits=4)])
def test_the_same_bits_in_parts_of_any_size(compressor: LoCo | QSGD, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for numel in (1 << 10, 1 << 30):
        monkeypatch.setattr(packed, "PART_NUMEL", {False: numel, True: numel})
        sync = engine(compressor, SPECS, scatter=True)
        results.append([reduce_step(sync, gradients(step, SPECS)) for step in range(3)])
    for small, large in zip(*results, strict=True):
        assert all(torch.equal(small[name], large[name]) for name in small)


def test_parts_have_every_piece_once_and_are_as_small_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PART_NUMEL", {False: 100, True: 10})
    rows = [Segment(0, numel, 0, 0, salt) for salt, numel in enumerate((60, 40, 1, 300, 0, 99, 1, 1))]
    parts = parts_of(Segments(rows), torch.device("cpu"))
    assert [[row.numel for row in part.rows] for part in parts] == [[60, 40], [1], [300], [0, 99, 1], [1]]
    (nothing,) = parts_of(Segments([]), torch.device("cpu"))
    assert not nothing.rows


def test_only_an_even_grid_can_do_without_residual() -> None:
    with pytest.raises(ValueError, match="codebook must be 'uniform' with residual='none'"):
        LoCo(residual="none", bits=2, codebook="fitted")
