"""Links with a delay: the program beside this file, which holds packets between the hosts, and its settings."""

from __future__ import annotations

import json
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_suffix(".c")
_MTU = (
    9000  # between regions that one provider connects; fewer packets for one machine that forwards those of all hosts
)
_NO_LIMIT_S = 10.0
_SHORTEST_QUEUE_S = 0.1  # as long as the queue of a link without a delay: see `namespaces`

# A host prepared for far links; `lowbit doctor` says why. Values are for 64 MB on the way.
SEND_BUFFER = "net.ipv4.tcp_wmem"
HOST_SETTINGS = {
    "net.ipv4.tcp_rmem": "4096 131072 67108864",
    SEND_BUFFER: "4096 131072 67108864",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_no_metrics_save": "1",
}
# Sends at once what its window holds, as cubic does, which not every namespace may take; bbr would spread it over up
# to half a round trip. Where packets are lost the machine's own is better.
WITHOUT_LOSS = {"net.ipv4.tcp_congestion_control": "reno"}


def send_buffer_nbytes(rate: float | None, round_trip_s: float, connections: int) -> int:
    """The largest that a connection needs, where all of a host's send at once: its share of what is on the way, and
    half as much again, which the kernel takes for itself. Longer ones fill the queues on the way until those drop
    packets.
    """
    largest = int(HOST_SETTINGS[SEND_BUFFER].split()[-1])
    shared = 0 if rate is None else int(1.5 * rate / 8 * round_trip_s / connections)
    return min(largest, max(262_144, shared)) if shared else largest


class Relay:
    """Joins namespaces, which have no interface yet, by one of a given name in each; root only.

    Args:
        namespaces: In the order of their addresses, 10.213.0.1 and on.
        interface: The name.
    """

    def __init__(self, namespaces: Sequence[str], interface: str) -> None:
        with tempfile.TemporaryDirectory(prefix="relay-") as folder:
            program = Path(folder, "relay")
            compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
            subprocess.run([compiler, "-std=gnu11", "-O2", str(_SOURCE), "-o", str(program)], check=True, timeout=60)
            self._process = subprocess.Popen(
                [str(program), interface, *namespaces], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self.set(rate=None, delay_s=0.0, loss=0.0)  # answers once it runs: the file is not needed any more

    @property
    def mtu(self) -> int:
        return _MTU

    def set(self, *, rate: float | None, delay_s: float, loss: float) -> dict[str, Any]:
        """Make all links like that from now on.

        Args:
            rate: Bits per second, each direction of a link by itself.
            delay_s: One way.
            loss: Share of the packets.

        Returns:
            Packets so far; of these, dropped from full queues, and lost; and by how much one was late at most.
        """
        queue_s = max(_SHORTEST_QUEUE_S, 2 * delay_s) if rate else _NO_LIMIT_S
        numbers = (0 if rate is None else rate / 8, delay_s * 1e9, queue_s * 1e9, loss * 1e6)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(" ".join(str(round(number)) for number in numbers) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the relay has ended: is /dev/net/tun there?")
        counted: dict[str, Any] = json.loads(answer)
        return counted

    def close(self) -> None:
        self._process.communicate(timeout=10)
