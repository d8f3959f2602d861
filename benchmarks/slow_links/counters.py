"""Bytes that an interface has sent, as the kernel counts them: payload and protocol headers, acknowledgements too."""

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
    return int(Path("/sys/class/net", interface(), "statistics", "tx_bytes").read_text())
