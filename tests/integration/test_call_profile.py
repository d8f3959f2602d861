"""Ways stay short: how many package functions a bucket in a steady step calls under DDP, and a Trainer to its hook."""

import pytest

from benchmarks.call_profile import profile_bucket, profile_trainer
from lowbit_strategy.kernels import native
from testing.processes.ranks import run_ranks


@pytest.mark.skipif(not native.available(), reason="the C extension is not built")
@pytest.mark.parametrize(("method", "first", "bucket"), [("loco4", 25, 100), ("topk", 25, 180), ("powersgd", 25, 180)])
def test_calls_of_a_bucket(method: str, first: int, bucket: int) -> None:
    """`first`: until the first collective."""
    found = run_ranks(profile_bucket, 2, method)[0]
    assert found["first"]["calls"] <= first, found["first"]["names"]
    assert found["bucket"]["calls"] <= bucket, found["bucket"]["names"]


@pytest.mark.skipif(not native.available(), reason="the C extension is not built")
def test_calls_from_the_trainer_to_its_hook() -> None:
    found = run_ranks(profile_trainer, 2, process_group=None, timeout=300)[0]["trainer"]
    assert found["calls"] <= 137, found["names"]
    assert found["files"] <= 20, found["names"]
