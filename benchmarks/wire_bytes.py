"""Bytes on the interface against the bytes that each method accounts for, every compressor, both operations.

    sudo .venv/bin/python -m benchmarks.wire_bytes --json benchmarks/results/wire_bytes.json

One rank per host in a network namespace of its own, so that the interface carries nothing else. The kernel counts whole
packets; less 66 bytes of Ethernet, IP and TCP headers each, what remains is what gloo was given, and gloo's own
messages: its framing, and the barriers around the measured steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.runs import show as show_table
from benchmarks.runs import table_of
from benchmarks.slow_links.wire_bytes import ROWS
from lowbit_strategy.methods.registry import PRESETS
from testing.hosts.namespaces import SlowNetwork, why_not
from testing.hosts.torchrun import run_on_hosts

SCRIPT = Path(__file__).parent / "slow_links" / "wire_bytes.py"
OPERATIONS = ("all-reduce", "reduce-scatter")
HEADER_NBYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps
SEGMENT_NBYTES = 1448  # of payload, at most


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A step of one variant, the ranks' mean.

    Args:
        accounted_nbytes: By the method.
        payload_nbytes: On the interface, without the headers of Ethernet, IP and TCP.
        sent_nbytes: On the interface, with everything.
        resent_nbytes: Part of the payload, at most: segments that TCP sent again. None where links are quiet.
        bits: Accounted, per element and hop: of (W - 1) / W of the elements once, or twice for an all-reduce.
    """

    variant: str
    accounted_nbytes: float
    payload_nbytes: float
    sent_nbytes: float
    resent_nbytes: float
    bits: float


def row_of(variant: str, reports: Sequence[Any], numel: int) -> Row:
    def mean(key: str) -> float:
        return statistics.mean(report[variant][key] for report in reports)

    world_size = len(reports)
    hops = (2 if variant.startswith("all-reduce/") else 1) * (world_size - 1) / world_size
    return Row(
        variant=variant,
        accounted_nbytes=mean("accounted_nbytes"),
        payload_nbytes=mean("sent_nbytes") - HEADER_NBYTES * mean("packets"),
        sent_nbytes=mean("sent_nbytes"),
        resent_nbytes=SEGMENT_NBYTES * mean("resent_segments"),
        bits=8 * mean("accounted_nbytes") / numel / hops,
    )


def measure(names: Sequence[str], *, world_size: int, numel: int, steps: int, timeout: float) -> list[Row]:
    """Needs root; see `testing.hosts.namespaces.why_not`."""
    variants = [f"{operation}/{name}" for operation in OPERATIONS for name in names]
    numel -= numel % (ROWS * world_size)
    arguments = ["--numel", str(numel), "--steps", str(steps), "--variants", *variants]
    with SlowNetwork(world_size) as network:
        reports = run_on_hosts(network, SCRIPT, arguments, timeout=timeout)
    return [row_of(variant, reports, numel) for variant in variants]


def show(rows: Sequence[Row], title: str) -> None:
    figures = ("bits per element and hop", "accounted, bytes", "payload", "payload more, %", "with headers, %")
    cells = (
        (
            row.variant,
            f"{row.bits:.3f}",
            f"{row.accounted_nbytes:,.0f}",
            f"{row.payload_nbytes:,.0f}",
            f"{100 * (row.payload_nbytes / row.accounted_nbytes - 1):+.2f}",
            f"{100 * (row.sent_nbytes / row.accounted_nbytes - 1):+.2f}",
        )
        for row in rows
    )
    show_table(table_of(title, ("variant",), figures, cells), width=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compressors", default=",".join(PRESETS), help="names, with commas; default all")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--numel", type=int, default=1 << 20)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"benchmarks/wire_bytes.py cannot run here: {reason}", file=sys.stderr)
        return 2
    rows = measure(
        options.compressors.split(","),
        world_size=options.world_size,
        numel=options.numel,
        steps=options.steps,
        timeout=options.timeout,
    )
    show(rows, f"A step of one rank, {options.numel:,} elements, {options.world_size} hosts")
    if options.json is not None:
        content = {"numel": options.numel, "world_size": options.world_size, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
