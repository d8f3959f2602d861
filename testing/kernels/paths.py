"""The kernels' implementations on this machine, one test for each."""

from __future__ import annotations

import pytest

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.native import ISA_OVERRIDE

_ISAS = ("avx512", "avx2", "portable")


def _choose(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa not in native.isas():
        pytest.skip(f"this processor has no {isa}")
    monkeypatch.setenv(ISA_OVERRIDE, isa)


@pytest.fixture(params=_ISAS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each of the processor's instruction sets."""
    _choose(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=["torch", *(_ISAS if native.available() else ())])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Plain PyTorch, and C with each of them."""
    if request.param == "torch":
        monkeypatch.setenv("LOWBIT_KERNELS", "torch")
    else:
        monkeypatch.setenv("LOWBIT_KERNELS", "native")
        _choose(request.param, monkeypatch)
    return request.param
