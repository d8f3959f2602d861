"""Machines in homes: each behind a router that translates addresses, in networks that do not see each other.

The homes all have the same private addresses, as homes do. What joins them is a private network over one machine with
a public address, which is the first host.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from errno import ECONNREFUSED
from pathlib import Path

from testing.hosts import tunnels
from testing.hosts.namespaces import PREFIX, Host, Network, ip, run

_PROGRAM = str(Path(__file__).with_name("tunnels.py"))
PUBLIC = "198.51.100.1"
AT_HOME = "192.168.1.2"  # of the machine in each home
_START_S = 20.0


class Homes(Network):
    """A machine with a public address and `num_homes` at home; addresses and interface are the private network's.

    Args:
        num_homes: How many.
    """

    interface = tunnels.INTERFACE

    def __init__(self, num_homes: int) -> None:
        prefix = f"{PREFIX}-{os.getpid()}"
        self.hosts = [Host(f"{prefix}-m{i}", f"10.9.0.{i + 1}") for i in range(num_homes + 1)]
        self._internet = f"{prefix}-internet"
        self._routers = [f"{prefix}-r{i}" for i in range(1, num_homes + 1)]
        self._programs: list[subprocess.Popen[bytes]] = []

    @property
    def _others(self) -> list[str]:
        return [*self._routers, self._internet]

    def outside(self, home: int) -> str:
        """The address of a home's router, the first home being 1."""
        return f"198.51.100.{home + 1}"

    def reaches(self, host: Host, address: str) -> bool:
        """Whether TCP packets of `host` get to `address` and answers get to it."""
        program = f"import socket; s = socket.socket(); s.settimeout(2); print(s.connect_ex(({address!r}, 9)))"
        return run("ip", "netns", "exec", host.namespace, sys.executable, "-c", program).strip() == str(ECONNREFUSED)

    def _create(self) -> None:
        for name in (self._internet, *self._routers, *(host.namespace for host in self.hosts)):
            run("ip", "netns", "add", name)
            ip(name, "link", "set", "lo", "up")
        ip(self._internet, "link", "add", "bridge", "type", "bridge")
        ip(self._internet, "link", "set", "bridge", "up")
        public, *at_home = self.hosts
        self._connect(public.namespace, "eth0", PUBLIC)
        self._start(public.namespace, "hub", "--address", public.address)
        for home, (router, host) in enumerate(zip(self._routers, at_home, strict=True), 1):
            self._connect(router, "wan0", self.outside(home))
            ip(router, "link", "add", "lan0", "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            for name, device, address in ((router, "lan0", "192.168.1.1"), (host.namespace, "eth0", AT_HOME)):
                ip(name, "address", "add", f"{address}/24", "dev", device)
                ip(name, "link", "set", device, "up")
            ip(host.namespace, "route", "add", "default", "via", "192.168.1.1")
            run("ip", "netns", "exec", router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
            self._start(router, "nat", "--to", "wan0")
            ip(router, "route", "add", PUBLIC, "dev", self.interface)
            self._start(host.namespace, "spoke", "--address", host.address, "--hub", PUBLIC)

    def _connect(self, namespace: str, device: str, address: str) -> None:
        """To the Internet."""
        port = f"port{address.rpartition('.')[2]}"
        ip(self._internet, "link", "add", port, "type", "veth", "peer", "name", device, "netns", namespace)
        ip(self._internet, "link", "set", port, "master", "bridge", "up")
        ip(namespace, "address", "add", f"{address}/24", "dev", device)
        ip(namespace, "link", "set", device, "up")

    def _start(self, namespace: str, *arguments: str) -> None:
        command = ["ip", "netns", "exec", namespace, sys.executable, _PROGRAM, *arguments]
        self._programs.append(subprocess.Popen(command))
        deadline = time.monotonic() + _START_S
        while not _is_up(namespace):
            assert time.monotonic() < deadline, f"{arguments[0]} has not started"
            time.sleep(0.02)

    def close(self) -> None:
        for program in self._programs:
            program.kill()
            program.wait()
        super().close()


def _is_up(namespace: str) -> bool:
    interfaces = run("ip", "-n", namespace, "-br", "link").splitlines()
    return any(line.startswith(tunnels.INTERFACE) and "UP" in line for line in interfaces)
