"""Whether new processes find the package by themselves."""

from __future__ import annotations

import pytest

from lowbit_strategy.doctor import doctor
from testing.processes.scripts import environment


def test_what_keeps_new_processes_from_finding_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.why_not_found() is None
    for switch in ("LOWBIT_AUTOLOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD"):
        with environment({switch: "0"}):
            assert doctor.why_not_found() == f"{switch}=0 turns it off"
    monkeypatch.setitem(doctor.ENTRY, "name", "another")
    assert "not installed" in str(doctor.why_not_found())
