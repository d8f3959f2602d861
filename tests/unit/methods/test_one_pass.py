"""Methods that select while the gradient is added, against the plain PyTorch path, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lowbit_strategy.codecs.base import StepContext
from lowbit_strategy.collectives.comm import LocalComm, wait_for_all
from lowbit_strategy.collectives.layout import ParamView, TensorSpec
from lowbit_strategy.kernels import native
from lowbit_strategy.methods._base.positions import SparseCompressor
from lowbit_strategy.methods._base.reducer import Reducer
from lowbit_strategy.methods.dgc import DGC
from lowbit_strategy.methods.exdyna import ExDyna
from lowbit_strategy.methods.topk import TopK
from lowbit_strategy.methods.zoo.sidco import SIDCo

_NUMEL = 2_200_000  # samples pay from here on
_METHODS = [TopK(density=0.001), DGC(density=0.002), SIDCo(density=0.002), ExDyna(density=0.002)]


def _gradients() -> list[Tensor]:
    """Ordinary ones, one of zeros, one with an infinity, one that overflows the residual, and another."""
    gradients = [torch.randn(_NUMEL, generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    gradients[2].zero_()
    gradients[3][1_500_000] = math.inf
    return gradients


def _run(compressor: SparseCompressor) -> list[tuple[Tensor, Tensor]]:
    spec = TensorSpec("weight", (_NUMEL,))
    reducer = compressor.method(spec)
    assert isinstance(reducer, Reducer)
    state, seen = reducer.init([spec], torch.device("cpu")), []
    for index, gradient in enumerate(_gradients()):
        if index == 4:
            state["weight"]["residual"][77] = gradient[77] = 3e38
        view = ParamView(spec, 1, _NUMEL, x=gradient, out=gradient)
        wait_for_all(reducer.reduce([view], state, LocalComm(), StepContext(index, index, index)))
        seen.append((gradient, state["weight"]["residual"].clone()))
    return seen


@pytest.mark.skipif(not native.available(), reason="the C extension is not built")
@pytest.mark.parametrize("compressor", _METHODS, ids=lambda compressor: compressor.name)
def test_one_pass_is_the_plain_path(compressor: SparseCompressor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWBIT_KERNELS", "torch")
    plain = _run(compressor)
    monkeypatch.setenv("LOWBIT_KERNELS", "native")
    for step, (ours, wanted) in enumerate(zip(_run(compressor), plain, strict=True)):
        for got, expected in zip(ours, wanted, strict=True):
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32)), step
    outs, residuals = [out for out, _ in plain], [residual for _, residual in plain]
    assert 0 < outs[0].count_nonzero() < 0.01 * _NUMEL
    if compressor.name != "exdyna":  # which sends leftovers in every step
        assert not outs[2].any()
        assert torch.equal(residuals[2], residuals[1])
    for step in (3, 4):
        assert outs[step].isnan().any()
        assert residuals[step].isfinite().all()
    assert torch.equal(residuals[3], residuals[2])
    assert outs[5].isfinite().all()
