"""Markers, and what every test starts from: one thread, the same examples each time, no distributed variables."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch read it
import torch

from testing.hosts.namespaces import why_not
from testing.processes.ranks import fork_server

gc.disable()  # until all is imported, and nothing of it is garbage
torch.set_num_threads(1)  # so that sums come out the same on every machine
for _profile, _examples in (("quick", 10), ("whole", 100)):
    hypothesis.settings.register_profile(
        _profile, max_examples=_examples, derandomize=True, deadline=None, database=None
    )

_GPU_TESTS = Path(__file__).parent / "gpu"


@functools.cache
def _can_make_namespaces() -> bool:
    """Being root is not enough: containers often run as root without the right to the network."""
    if why_not() is not None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, timeout=30).returncode == 0


def pytest_configure(config: pytest.Config) -> None:
    """More examples where slow tests run too."""
    hypothesis.settings.load_profile("quick" if config.getoption("markexpr") == "not slow" else "whole")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Ranks are forked from what has been imported when the last test has been collected."""
    gc.enable()
    if session.items:  # none where others run them
        fork_server()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are left out where there is no GPU, so that the closing line counts the tests that have run."""
    gpu = [item for item in items if _GPU_TESTS in item.path.parents]
    for item in gpu:
        item.add_marker(pytest.mark.gpu)
    if gpu and not torch.cuda.is_available():
        items[:] = [item for item in items if _GPU_TESTS not in item.path.parents]
        config.hook.pytest_deselected(items=gpu)
    for item in items:
        if item.get_closest_marker("root") and not _can_make_namespaces():
            item.add_marker(pytest.mark.skip(reason="needs root, with the right to make network namespaces"))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """A test that starts processes hands them neither the variables of what launched pytest nor another test's."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)
