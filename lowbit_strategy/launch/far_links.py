"""What `lowbit doctor` says about this machine's TCP, for links with a delay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lowbit_strategy.launch.doctor import Finding

_ROOT = Path("/proc/sys/net/ipv4")
_FAR = 1e9 * 0.15 / 8  # bytes on the way at 1 Gbit/s and a round trip of 150 ms
_PAGE = "docs/multi-node.md"


def examine_far_links(root: Path = _ROOT) -> Iterator[Finding]:
    """Socket buffers, slow start after idle, congestion control; nothing where the kernel does not say."""
    for name in ("tcp_rmem", "tcp_wmem"):
        if (text := _read(root / name)) is not None:
            largest = int(text.split()[-1])
            found = f"at most {largest / 1e6:.1f} MB"
            if largest < _FAR:
                advice = f"on a link of R bit/s and a round trip of T seconds it has to be R * T / 8 bytes: {_PAGE}"
                yield Finding("note", f"net.ipv4.{name}", found, advice)
            else:
                yield Finding("ok", f"net.ipv4.{name}", found)
    if (text := _read(root / "tcp_slow_start_after_idle")) is not None:
        if text == "0":
            yield Finding("ok", "slow start after idle", "off")
        else:
            advice = f"far links: every step begins slowly; sysctl -w net.ipv4.tcp_slow_start_after_idle=0: {_PAGE}"
            yield Finding("note", "slow start after idle", "on", advice)
    if (text := _read(root / "tcp_congestion_control")) is not None:
        if text == "bbr":
            yield Finding("ok", "congestion control", text)
        else:
            yield Finding("note", "congestion control", text, f"on far links that lose packets bbr is faster: {_PAGE}")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
