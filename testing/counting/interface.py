"""What an interface has sent, as the kernel counts it: payload and protocol headers, acknowledgements too."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


def interface() -> str:
    """The interface gloo is configured to use."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None:
        raise RuntimeError("GLOO_SOCKET_IFNAME is not set: which interface carries the traffic is unknown")
    return name


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """Since the interface is up, or between two readings.

    Args:
        sent_nbytes: With the headers of Ethernet, IP and TCP.
        packets: As handed to the interface: one that its driver would cut into many counts once, with one header.
        resent_segments: TCP segments sent more than once: on a busy machine acknowledgements come late.
    """

    sent_nbytes: int
    packets: int
    resent_segments: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            sent_nbytes=self.sent_nbytes - other.sent_nbytes,
            packets=self.packets - other.packets,
            resent_segments=self.resent_segments - other.resent_segments,
        )


def read() -> Counters:
    return Counters(sent_nbytes=sent_nbytes(), packets=_count("tx_packets"), resent_segments=_resent_segments())


def sent_nbytes() -> int:
    return _count("tx_bytes")


def _resent_segments() -> int:
    names, values = (line.split()[1:] for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return int(values[names.index("RetransSegs")])


def _count(name: str) -> int:
    return int(Path("/sys/class/net", interface(), "statistics", name).read_text())
