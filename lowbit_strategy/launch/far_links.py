"""What `lowbit doctor` says about this machine's TCP, for links with a delay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lowbit_strategy.launch.doctor import Finding

_ROOT = Path("/proc/sys/net/ipv4")
_FAR = 1e9 * 0.15 / 8  # bytes on the way at 1 Gbit/s and a round trip of 150 ms
_PAGE = "docs/multi-node.md"


def examine_far_links(root: Path = _ROOT) -> Iterator[Finding]:
    """Socket buffers, slow start after idle, congestion control; nothing where the kernel does not say.

    How long send buffers should be depends on the link, which is not known here: it is always noted.
    """
    if (text := _read(root / "tcp_rmem")) is not None:
        largest = int(text.split()[-1])
        advice = f"on a link of R bit/s and a round trip of T seconds it has to be R * T / 8 bytes: {_PAGE}"
        yield _judged("tcp_rmem", largest, largest < _FAR, advice)
    if (text := _read(root / "tcp_wmem")) is not None:
        largest = int(text.split()[-1])
        advice = (
            "far links: 1.5 * R * T / 8 bytes for R bit/s and a round trip of T seconds, shared by this host's"
            f" connections over the link; longer ones overflow queues on the way: {_PAGE}"
        )
        yield _judged("tcp_wmem", largest, True, advice)
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


def _judged(name: str, largest: int, noted: bool, advice: str) -> Finding:
    found = f"at most {largest / 1e6:.1f} MB"
    return Finding("note", f"net.ipv4.{name}", found, advice) if noted else Finding("ok", f"net.ipv4.{name}", found)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
