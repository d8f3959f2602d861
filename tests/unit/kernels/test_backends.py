"""Which implementation serves a device, and what is refused."""

from __future__ import annotations

import pytest
import torch

from lowbit_strategy.kernels import backends

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_the_c_kernels_are_refused_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would read device addresses as if they were the host's."""
    monkeypatch.setenv(backends.OVERRIDE, "native")
    with pytest.raises(RuntimeError, match=r"supports CPUs only, but the gradients are on cuda:0: unset it"):
        backends.choose(CUDA)


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(backends.OVERRIDE, "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        backends.choose(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.choose(CPU) == "triton"
    assert backends.choose(CUDA) == "triton"


def test_unknown_names_and_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(backends.OVERRIDE, raising=False)
    with pytest.raises(RuntimeError, match="no kernels for device type 'meta'"):
        backends.choose(torch.device("meta"))
    monkeypatch.setenv(backends.OVERRIDE, "cuda")
    with pytest.raises(RuntimeError, match="not one of torch, native, triton"):
        backends.choose(CPU)


def test_a_cuda_graphs_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds and resets are arguments of the launch, which a graph would repeat; tests/gpu captures a real one."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
        backends.choose(CUDA)
    backends.choose(CPU)
