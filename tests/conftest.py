"""Markers, and what every test starts from: one thread, the same examples each time, no distributed variables."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # so that sums come out the same on every machine
hypothesis.settings.register_profile("project", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("project")

_GPU_TESTS = Path(__file__).parent / "gpu"
_CAN_MAKE_NAMESPACES = (
    sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if item.get_closest_marker("root") and not _CAN_MAKE_NAMESPACES:
            item.add_marker(pytest.mark.skip(reason="needs root and the ip and tc commands"))


@pytest.fixture(autouse=True)
def _no_distributed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that starts processes must not hand them the variables of whatever launched pytest."""
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
