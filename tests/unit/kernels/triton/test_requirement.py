"""Triton comes with torch's CUDA builds: the package neither asks for another nor runs with one that is too old."""

from __future__ import annotations

import importlib
import sys

import pytest

from testing.processes.scripts import REPOSITORY

tomllib = pytest.importorskip("tomllib", reason="needs Python 3.11 or newer to read pyproject.toml")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def test_triton_is_required_by_no_installation_for_users() -> None:
    """A requirement on it would replace the files of ROCm's triton, which has another name but the same folder."""
    extras = PROJECT["optional-dependencies"]
    lists = [PROJECT["dependencies"], *(wanted for name, wanted in extras.items() if name not in ("test", "dev"))]
    assert not [line for wanted in lists for line in wanted if line.startswith(("triton", "pytorch-triton"))]
    (line,) = [line for line in extras["test"] if line.startswith("triton")]
    assert "x86_64" in line
    assert "aarch64" in line


def test_an_older_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", "3.4.1+git")
    monkeypatch.delitem(sys.modules, "lowbit_strategy.kernels.triton", raising=False)
    with pytest.raises(RuntimeError, match=r"Triton 3\.4\.1\+git is too old"):
        importlib.import_module("lowbit_strategy.kernels.triton")
