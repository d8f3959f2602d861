"""Bytes that the monitor reports against bytes that the kernel counts on a real interface."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from testing.hosts.namespaces import SlowNetwork
from testing.hosts.torchrun import run_on_hosts

SCRIPT = Path(__file__).parent / "scripts" / "monitored.py"
COMPRESSORS = ("dense", "loco", "topk", "powersgd")
STEPS = 8  # counted ones
HEADER_NBYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with timestamps
SEGMENT_NBYTES = 1448  # of payload, at most
# gloo's own messages of 48 bytes that one of two ranks sends per call: measured with each collective on its own.
GLOO_NBYTES = 48
MESSAGES = {"all_reduce": 12, "all_to_all_single": 3, "all_gather_into_tensor": 6, "all_gather": 6, "broadcast": 2}
BARRIER_MESSAGES = 3


@pytest.mark.slow  # what engines and methods account for against the same interface: test_wire_bytes.py
@pytest.mark.root
def test_the_monitor_tells_what_the_interface_counts() -> None:
    with SlowNetwork(2) as network:
        reports = run_on_hosts(network, SCRIPT, ["--compressors", *COMPRESSORS], timeout=240)
    for name in COMPRESSORS:
        figures = [report[name] for report in reports]
        assert figures[0]["observed"] == figures[1]["observed"]  # the ranks' mean
        assert len(figures[0]["observed"]) == STEPS
        counted = [each["counted"] for each in figures]
        payload = statistics.mean(one["sent_nbytes"] - HEADER_NBYTES * one["packets"] for one in counted) / STEPS
        resent = statistics.mean(SEGMENT_NBYTES * one["resent_segments"] for one in counted) / STEPS
        calls = figures[0]["calls"]
        messages = BARRIER_MESSAGES + sum(MESSAGES[call] * count for call, count in calls.items())
        # What observing itself sends: sums in float64, seven per parameter, and a sample of the gradients.
        own = 7 * 8 * (figures[0]["num_parameters"] + 1) + statistics.mean(figures[0]["sampled"])
        framing = payload - own - statistics.mean(figures[0]["observed"])
        expected = GLOO_NBYTES * messages / STEPS
        assert abs(framing - expected) <= 0.03 * expected + resent, (name, framing, expected, resent)
