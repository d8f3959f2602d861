"""What an interface has sent, as the kernel counts it: payload and protocol headers, acknowledgements too."""

from __future__ import annotations

import os
from pathlib import Path


def interface() -> str:
    """The interface gloo was told to use."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name is None:
        raise RuntimeError("GLOO_SOCKET_IFNAME is not set: which interface carries the traffic is unknown")
    return name


def sent_nbytes() -> int:
    return _count("tx_bytes")


def sent_packets() -> int:
    """As handed to the interface: one that its driver would cut into many counts once, with one header."""
    return _count("tx_packets")


def _count(name: str) -> int:
    return int(Path("/sys/class/net", interface(), "statistics", name).read_text())
