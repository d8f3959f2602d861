"""Hosts behind slow links on one machine: network namespaces joined by a bridge, each link limited at both ends.

The bridge has a namespace of its own, so nothing is added to the machine's own network and nothing leaves it. Where
links are far, a program joins the namespaces in the bridge's place (`relay`): the kernel's limiters do not delay.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from typing_extensions import Self

from testing.hosts.relay import HOST_SETTINGS, SEND_BUFFER, WITHOUT_LOSS, Relay, send_buffer_nbytes

INTERFACE = "eth0"  # in every host
PREFIX = "lowbit"
_NAME = re.compile(rf"{PREFIX}-(\d+)-\w+")
# A burst must hold the largest packet the kernel hands over at once (64 kB); the queue drops nothing that gloo sends.
_CLONE_NEWNET = 0x40000000  # of sched.h
_SHAPING = ("burst", "256kb", "latency", "100ms")


class Host(NamedTuple):
    """A namespace and its address in the private network."""

    namespace: str
    address: str


class Network:
    """Hosts in namespaces, removed at the end. A context manager; root only.

    Names carry this process's id: networks of several runs live side by side, and what a killed run has left behind
    is recognized and removed by the next.

    Attributes:
        hosts: The namespaces that programs run in.
        interface: By which these see each other, in every host.
    """

    hosts: list[Host]
    interface: str

    def __enter__(self) -> Self:
        remove_leftovers()
        atexit.register(self.close)
        try:
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _create(self) -> None:
        raise NotImplementedError

    @property
    def _others(self) -> list[str]:
        """Namespaces beside the hosts."""
        return []

    def close(self) -> None:
        atexit.unregister(self.close)
        existing = _namespaces()
        for name in [*(host.namespace for host in self.hosts), *self._others]:
            if name in existing:
                _remove(name)


class SlowNetwork(Network):
    """`num_hosts` namespaces that see each other and nothing else.

    Args:
        num_hosts: How many.
        delay_s: Of every packet, one way.
        loss: Share of the packets that are lost.
        settings: Of every host's kernel where links are far, beside or in place of those of `relay`. Send buffers
            that are not among them are what the limit of bandwidth lets travel, shared by all connections of a host.
        ranks_per_host: Each has a connection to every other host.
    """

    interface = INTERFACE

    def __init__(
        self,
        num_hosts: int,
        *,
        delay_s: float = 0.0,
        loss: float = 0.0,
        settings: Mapping[str, str] | None = None,
        ranks_per_host: int = 1,
    ) -> None:
        self.delay_s = delay_s
        self.loss = loss
        self._settings = HOST_SETTINGS | ({} if loss else WITHOUT_LOSS) | dict(settings or {})
        self._shares_buffers = SEND_BUFFER not in (settings or {})
        self._connections = max(1, num_hosts - 1) * ranks_per_host
        self._send_buffer = self._settings[SEND_BUFFER]
        self._relay: Relay | None = None
        prefix = f"{PREFIX}-{os.getpid()}"
        self.switch = f"{prefix}-switch"
        self.hosts = [Host(f"{prefix}-h{i}", f"10.213.0.{i + 1}") for i in range(num_hosts)]

    @property
    def _others(self) -> list[str]:
        return [self.switch]

    @property
    def is_far(self) -> bool:
        return bool(self.delay_s or self.loss)

    def _create(self) -> None:
        run("ip", "netns", "add", self.switch)
        if self.is_far:
            self._create_far()
            return
        ip(self.switch, "link", "add", "bridge", "type", "bridge")
        ip(self.switch, "link", "set", "bridge", "up")
        for index, host in enumerate(self.hosts):
            port = f"port{index}"
            run("ip", "netns", "add", host.namespace)
            ip(self.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", host.namespace)
            ip(self.switch, "link", "set", port, "master", "bridge", "up")
            ip(host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            ip(host.namespace, "link", "set", INTERFACE, "up")
            ip(host.namespace, "link", "set", "lo", "up")

    def _create_far(self) -> None:
        names = [host.namespace for host in self.hosts]
        for name in names:
            run("ip", "netns", "add", name)
        self._relay = Relay(names, INTERFACE)
        for host in self.hosts:
            ip(host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            ip(host.namespace, "link", "set", INTERFACE, "up", "mtu", str(self._relay.mtu), "txqueuelen", "10000")
            ip(host.namespace, "link", "set", "lo", "up")
        self._configure(self._settings)

    def _configure(self, settings: Mapping[str, str]) -> None:
        written = [f"{name}={value}" for name, value in settings.items()]
        for host in self.hosts:
            run("ip", "netns", "exec", host.namespace, "sysctl", "-q", "-w", *written)

    def probe(self, seconds: float = 5.0) -> dict[str, Any]:
        """What the link between two hosts gives, to one connection that has it alone: see `probe`."""
        script, (server, client) = str(Path(__file__).with_name("probe.py")), self.hosts[:2]
        if self._shares_buffers and self.is_far:
            self._configure({SEND_BUFFER: HOST_SETTINGS[SEND_BUFFER]})
        serving = subprocess.Popen(
            ["ip", "netns", "exec", server.namespace, sys.executable, script, "serve", server.address]
        )
        try:
            asking = [sys.executable, script, "ask", server.address, str(seconds)]
            measured: dict[str, Any] = json.loads(run("ip", "netns", "exec", client.namespace, *asking))
        finally:
            serving.kill()
            serving.wait()
            if self.is_far:
                self._configure({SEND_BUFFER: self._send_buffer})
        return measured

    def set_rate(self, rate: str | None) -> dict[str, Any]:
        """Limit every host's link, each direction by itself, to `rate` (as `tc` writes it: 200mbit); None: no limit.

        Returns:
            What has happened to packets so far, where links are far.
        """
        if self._relay is not None:
            bps = None if rate is None else bits_per_second(rate)
            if self._shares_buffers:
                nbytes = send_buffer_nbytes(bps, 2 * self.delay_s, self._connections)
                self._send_buffer = " ".join((*HOST_SETTINGS[SEND_BUFFER].split()[:2], str(nbytes)))
                self._configure({SEND_BUFFER: self._send_buffer})
            return self._relay.set(rate=bps, delay_s=self.delay_s, loss=self.loss)
        for index, host in enumerate(self.hosts):
            for namespace, device in ((host.namespace, INTERFACE), (self.switch, f"port{index}")):
                if rate is not None:
                    run(
                        "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, *_SHAPING
                    )
                elif "tbf" in run("tc", "-n", namespace, "qdisc", "show", "dev", device):
                    run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
        return {}

    def cut(self, first: int, second: int | None = None) -> None:
        """What these two hosts send to each other is lost from now on; without `second`, all that `first` sends and
        gets. Links must not be far.
        """
        if second is None:
            ip(self.switch, "link", "set", f"port{first}", "down")
            return
        for one, other in ((first, second), (second, first)):
            nobody = ("lladdr", "02:00:00:00:00:00", "dev", INTERFACE, "nud", "permanent")
            ip(self.hosts[one].namespace, "neigh", "replace", self.hosts[other].address, *nobody)

    def mend(self, first: int, second: int | None = None) -> None:
        """After `cut`."""
        if second is None:
            ip(self.switch, "link", "set", f"port{first}", "up")
            return
        for one, other in ((first, second), (second, first)):
            ip(self.hosts[one].namespace, "neigh", "del", self.hosts[other].address, "dev", INTERFACE)

    def signal_all(self, number: signal.Signals) -> None:
        """Signal every process inside, also those in sessions of their own."""
        for host in self.hosts:
            _signal_inside(host.namespace, number)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        super().close()


def enter(namespace: str) -> None:
    """Move this process into a host. Before it has other threads, which would stay behind.

    Raises:
        OSError: There is none, or this is not root.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def bits_per_second(rate: str) -> float:
    """Of a rate as `tc` writes it.

    Raises:
        ValueError: It is written in another way.
    """
    match = re.fullmatch(r"([0-9.]+)(k|m|g)bit", rate.lower())
    if match is None:
        raise ValueError(f"{rate!r} is no rate: write 200mbit, 1gbit or 500kbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def why_not() -> str | None:
    """What this machine lacks for a `SlowNetwork`, in words; None if nothing."""
    if sys.platform != "linux":
        return f"network namespaces are a feature of Linux, this is {sys.platform}"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"the command {missing[0]} is missing: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root: run this command with sudo"
    return None


def remove_leftovers() -> None:
    """Remove the namespaces of runs whose process is gone."""
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match and not _is_alive(int(match[1])):
            _remove(name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _namespaces() -> list[str]:
    return [line.split()[0] for line in run("ip", "netns", "list").splitlines() if line]


def _signal_inside(namespace: str, number: signal.Signals) -> None:
    for pid in run("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.kill(int(pid), number)


def _remove(namespace: str) -> None:
    """With all processes inside."""
    _signal_inside(namespace, signal.SIGKILL)
    run("ip", "netns", "del", namespace)


def ip(namespace: str, *arguments: str) -> None:
    """The command inside a namespace."""
    run("ip", "-n", namespace, *arguments)


def run(*command: str) -> str:
    """What it prints.

    Raises:
        RuntimeError: It fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
