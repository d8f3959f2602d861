"""Bytes that the monitor reports against bytes that the kernel counts on a real interface."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from slow_links.hosts import run_on_hosts
from slow_links.namespaces import SlowNetwork

SCRIPT = Path(__file__).parent / "scripts" / "monitored.py"
COMPRESSORS = ("dense", "loco", "topk", "powersgd")
STEPS = 8  # counted ones
HEADER_NBYTES = 14 + 20 + 32  # of a packet: Ethernet, IPv4, TCP with timestamps
SEGMENT_NBYTES = 1448  # of payload, at most
# gloo's own, of a rank in a step: of a message, and messages; 24 of them are those of three buckets' samples
FRAMING_NBYTES = 48 * 84


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
        # What observing itself sends: sums in float64, seven per parameter, and a sample of the gradients.
        own = 7 * 8 * (figures[0]["num_parameters"] + 1) + statistics.mean(figures[0]["sampled"])
        framing = payload - own - statistics.mean(figures[0]["observed"])
        assert 0 <= framing <= FRAMING_NBYTES + resent, (name, framing, resent)
