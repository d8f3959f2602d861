"""The way of a gradient stays short: how many package functions one bucket calls in a steady step under DDP."""

import pytest

from benchmarks.call_profile import profile_bucket
from lowbit_strategy.kernels import native
from testing.processes.ranks import run_ranks


@pytest.mark.skipif(not native.available(), reason="the C extension is not built")
@pytest.mark.parametrize(("method", "first", "bucket"), [("loco4", 25, 100), ("topk", 25, 180), ("powersgd", 25, 180)])
def test_calls_of_a_bucket(method: str, first: int, bucket: int) -> None:
    """`first`: until the first collective."""
    found = run_ranks(profile_bucket, 2, method)[0]
    assert found["first"]["calls"] <= first, found["first"]["names"]
    assert found["bucket"]["calls"] <= bucket, found["bucket"]["names"]
