"""The kernels' implementations on this machine, one test for each."""

from __future__ import annotations

import pytest

from lowbit_strategy.kernels import native
from lowbit_strategy.kernels.native import ISA_OVERRIDE

_PATHS = ["torch", *(("avx512", "avx2", "portable") if native.available() else ())]


@pytest.fixture(params=_PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setenv("LOWBIT_KERNELS", "torch")
    else:
        if request.param not in native.isas():
            pytest.skip(f"this processor has no {request.param}")
        monkeypatch.setenv("LOWBIT_KERNELS", "native")
        monkeypatch.setenv(ISA_OVERRIDE, request.param)
    return request.param
